/* Row updates in one pass over memory: a block of values at a time goes through every stage while it is in the core's
 * first cache. Float32. Rounding follows the torch operators of the reference path (engine/update.py), step by step; so
 * contraction is off (see library.py) and the fused multiply-adds that torch uses are written out.
 *
 * Equations: averaging/sma.py and engine/optimizers.py.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024 /* 4 KiB an array: weights, gradients, two states, z and corrections fit 32 KiB */
#define CHUNK (16 * BLOCK) /* of one row before the next: long enough to prefetch; z and the sum fit the second cache */
#define LANES 16
#define VALUES 8

/* One vector of the layout for some learners: row j of weights, states and shadow begins at j * stride. */
typedef struct {
    float *weights, *gradients, *state[2];
    float *corrections; /* the sum of the learners' corrections is written here */
    const float *z;
    uint16_t *shadow; /* bfloat16 copy of the weights, or NULL */
    int64_t count, stride, gradient_stride;
    int64_t decays; /* whether weight decay applies */
} Vector;

typedef struct {
    int64_t skipped; /* its row stays as it is, and it adds nothing to the sum */
    float gradient_scale, decay, values[VALUES];
} Learner;

static void pull(float *restrict c, const float *restrict w, const float *restrict z, float rate, int64_t n)
{
    for (int64_t i = 0; i < n; i++) c[i] = (w[i] - z[i]) * rate;
}

static void subtract(float *restrict w, const float *restrict c, int64_t n)
{
    for (int64_t i = 0; i < n; i++) w[i] -= c[i];
}

static void scale(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* x += alpha * y, rounded once */
static void add(float *restrict x, const float *restrict y, float alpha, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = fmaf(y[i], alpha, x[i]);
}

static void to_bfloat16(uint16_t *restrict out, const float *restrict w, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &w[i], sizeof bits);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        out[i] = (uint16_t)(w[i] != w[i] ? 0x7FC0 : rounded);
    }
}

/* values: momentum, learning rate, 1 for Nesterov's form; as `native_values` in engine/optimizers.py, like the next */
static void sgd(float *restrict w, float *restrict g, float *restrict u, float *unused, const float *values, float decay,
                int64_t n)
{
    const float momentum = values[0], rate = values[1];
    (void)unused;
    if (decay != 0) add(g, w, decay, n);
    if (momentum == 0) {
        add(w, g, -rate, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float kept = u[i] * momentum;
        u[i] = kept + g[i];
    }
    if (values[2] != 0) {
        add(g, u, momentum, n);
        add(w, g, -rate, n);
    } else
        add(w, u, -rate, n);
}

/* values: 1 - learning rate * weight decay, 1 - beta1, beta2, 1 - beta2, sqrt of the second bias correction, epsilon,
 * -learning rate / first bias correction */
static void adamw(float *restrict w, float *restrict g, float *restrict a, float *restrict v, const float *values,
                  float decay, int64_t n)
{
    const float keep = values[0], take1 = values[1], beta2 = values[2], take2 = values[3], root = values[4],
                epsilon = values[5], rate = values[6];
    if (decay != 0) scale(w, keep, n);
    for (int64_t i = 0; i < n; i++) {
        float first = take1 < 0.5f ? fmaf(take1, g[i] - a[i], a[i]) : fmaf(take1 - 1, g[i] - a[i], g[i]);
        float second = v[i] * beta2;
        second = second + take2 * (g[i] * g[i]);
        a[i] = first;
        v[i] = second;
        w[i] = w[i] + rate * (first / (sqrtf(second) / root + epsilon));
    }
}

typedef void (*Step)(float *, float *, float *, float *, const float *, float, int64_t);
static const Step STEPS[] = {sgd, adamw};

/* Values [at, at + n) of learner j's row; n <= BLOCK. `first` says that no learner before added to the corrections. */
static void update_block(const Vector *v, const Learner *own, int64_t j, Step step, int averages, float correction,
                         int first, int64_t at, int64_t n)
{
    float pulled[BLOCK], *total = v->corrections + at;
    const int64_t in_row = j * v->stride + at;
    float *w = v->weights + in_row, *g = v->gradients + j * v->gradient_stride + at;
    if (own->gradient_scale != 1) scale(g, own->gradient_scale, n);
    if (averages) {
        pull(pulled, w, v->z + at, correction, n);
        if (first)
            memcpy(total, pulled, (size_t)n * sizeof(float));
        else
            add(total, pulled, 1, n);
    }
    step(w, g, v->state[0] ? v->state[0] + in_row : 0, v->state[1] ? v->state[1] + in_row : 0, own->values,
         v->decays ? own->decay : 0, n);
    if (averages) subtract(w, pulled, n);
    if (v->shadow) to_bfloat16(v->shadow + in_row, w, n);
}

/* Values [begin, begin + n) of all rows, one row after the other; n <= CHUNK */
static void update_chunk(const Vector *v, const Learner *learners, int64_t num_learners, Step step, int averages,
                         float correction, int64_t begin, int64_t n)
{
    int first = 1;
    for (int64_t j = 0; j < num_learners; j++) {
        if (learners[j].skipped) continue;
        for (int64_t at = 0; at < n; at += BLOCK)
            update_block(v, learners + j, j, step, averages, correction, first, begin + at,
                         n - at < BLOCK ? n - at : BLOCK);
        first = 0;
    }
    if (averages && first) memset(v->corrections + begin, 0, (size_t)n * sizeof(float));
}

/* Part `part` of `num_parts` of all vectors: gradient steps and corrections of the learners, and the corrections' sum.
 * `optimizer` is 0 for SGD and 1 for AdamW; `averages` is 0 in a round that does not average. */
void crossbow_update(const Vector *vectors, int64_t num_vectors, const Learner *learners, int64_t num_learners,
                     int64_t optimizer, int64_t averages, float correction, int64_t part, int64_t num_parts)
{
    int64_t chunk = 0;
    for (int64_t i = 0; i < num_vectors; i++)
        for (int64_t begin = 0; begin < vectors[i].count; begin += CHUNK, chunk++) {
            if (chunk % num_parts != part) continue;
            const int64_t left = vectors[i].count - begin;
            update_chunk(vectors + i, learners, num_learners, STEPS[optimizer], averages != 0, correction, begin,
                         left < CHUNK ? left : CHUNK);
        }
}

/* total <- the sum of the rows, in their order */
void crossbow_sum(float *total, const float *const *rows, int64_t num_rows, int64_t count)
{
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t n = count - first < BLOCK ? count - first : BLOCK;
        memcpy(total + first, rows[0] + first, (size_t)n * sizeof(float));
        for (int64_t j = 1; j < num_rows; j++) add(total + first, rows[j] + first, 1, n);
    }
}

/* z' = z + total + momentum * (z - z_prev); z_prev <- z; z <- z' */
void crossbow_move(float *restrict z, float *restrict z_prev, const float *restrict total, float momentum, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float step = (z[i] - z_prev[i]) * momentum;
        step = step + total[i];
        z_prev[i] = z[i];
        z[i] = z[i] + step;
    }
}

static double sum_of_squares(const float *values, int64_t count)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (; i < count; i++) sum += (double)values[i] * (double)values[i];
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

/* sums[j] <- the sum of squares of learner j's gradient, for the learners j = part, part + num_parts, ... */
void crossbow_sums_of_squares(const Vector *vectors, int64_t num_vectors, double *sums, int64_t num_learners,
                              int64_t part, int64_t num_parts)
{
    for (int64_t j = part; j < num_learners; j += num_parts) {
        sums[j] = 0;
        for (int64_t i = 0; i < num_vectors; i++)
            sums[j] += sum_of_squares(vectors[i].gradients + j * vectors[i].gradient_stride, vectors[i].count);
    }
}
