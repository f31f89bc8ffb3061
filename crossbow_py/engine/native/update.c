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
#define LANES 16

typedef struct {
    float *weights, *gradients, *state[2], *corrections; /* corrections: NULL in a round that does not average */
    const float *z;
    uint16_t *shadow; /* bfloat16 copy of the weights, or NULL */
    int64_t count;
} Row;

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

/* values: momentum, learning rate, 1 for Nesterov's form */
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

static void update(const Row *row, Step step, float gradient_scale, float correction, const float *values, float decay)
{
    for (int64_t first = 0; first < row->count; first += BLOCK) {
        const int64_t n = row->count - first < BLOCK ? row->count - first : BLOCK;
        float *w = row->weights + first, *g = row->gradients + first;
        float *s0 = row->state[0] ? row->state[0] + first : 0, *s1 = row->state[1] ? row->state[1] + first : 0;
        if (gradient_scale != 1) scale(g, gradient_scale, n);
        if (row->corrections) pull(row->corrections + first, w, row->z + first, correction, n);
        step(w, g, s0, s1, values, decay, n);
        if (row->corrections) subtract(w, row->corrections + first, n);
        if (row->shadow) to_bfloat16(row->shadow + first, w, n);
    }
}

void crossbow_sgd(const Row *row, float gradient_scale, float correction, const float *values, float decay)
{
    update(row, sgd, gradient_scale, correction, values, decay);
}

void crossbow_adamw(const Row *row, float gradient_scale, float correction, const float *values, float decay)
{
    update(row, adamw, gradient_scale, correction, values, decay);
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

double crossbow_sum_of_squares(const float *values, int64_t count)
{
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (; i < count; i++) sum += (double)values[i] * (double)values[i];
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}
