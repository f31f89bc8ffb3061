/* Row updates in one pass over memory: a learner's weights, gradients and states are read once and written once, and
 * what the learners share (z, z_prev, the sum of corrections) once for all of them. Float32. Rounding follows the torch
 * operators of the reference path (engine/update/row_update.py), step by step; so contraction is off (see library.py) and the fused
 * multiply-adds that torch uses are written out.
 *
 * Equations: averaging/sma.py and engine/update/optimizers.py.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Values of one row before those of the next: long enough to prefetch, and what the rows share stays in the second
 * cache until the last of them is through. */
#define CHUNK 16384
#define LEAST_CHUNK 1024 /* to be shared between threads */
#define READ_CHUNK 65536 /* where nothing is shared, the longer run is the faster one */
#define VALUES 8
#define INLINE static inline __attribute__((always_inline))

/* One vector of the layout for some learners: row j of weights, states and shadow begins at j * stride. */
typedef struct {
    float *weights;
    const float *gradients;
    float *state[2];
    float *total; /* the sum by which z moves is written here */
    float *z, *z_prev;
    uint16_t *shadow; /* bfloat16 copy of the weights, or NULL */
    int64_t count, stride, gradient_stride;
    int64_t decays; /* whether weight decay applies */
    int64_t group;  /* which settings of a learner apply: group g has those from g * num_learners on */
} Vector;

typedef struct {
    int64_t skipped;  /* its row stays as it is, and it adds nothing to the sum */
    int64_t function; /* 0 for the step of SGD, 1 for that of AdamW */
    float gradient_scale, decay, values[VALUES];
} Learner;

typedef struct {
    int64_t averages; /* 0 in a round that does not average; the rest has no meaning then */
    int64_t moves;    /* whether z moves in the same pass */
    int64_t follows;  /* whether the sum is that of new weights' distances from z, not of corrections */
    float correction, momentum, share;
} Averaging;

/* The form of a loop is known when it is compiled, so that no loop has branches and all are vectorised. */
enum { PULLS = 1, ADDS = 2, HAS_SHADOW = 4, DECAYS = 8, MOMENTUM = 16, NESTEROV = 32, ADAMW = 64, FAR = 128 };

/* values: momentum, learning rate, 1 for Nesterov's form; as `native_steps` in engine/update/optimizers.py, like the next */
INLINE float sgd(const int form, float w, float g, float *u, const float *values, float decay)
{
    const float momentum = values[0], rate = values[1];
    float step = form & DECAYS ? fmaf(w, decay, g) : g;
    if (form & MOMENTUM) {
        const float kept = *u * momentum;
        *u = kept + step;
        step = form & NESTEROV ? fmaf(*u, momentum, step) : *u;
    }
    return fmaf(step, -rate, w);
}

/* values: 1 - learning rate * weight decay, 1 - beta1, beta2, 1 - beta2, sqrt of the second bias correction, epsilon,
 * -learning rate / first bias correction. FAR: 1 - beta1 is at least a half, where torch's lerp begins at the other end. */
INLINE float adamw(const int form, float w, float g, float *a, float *v, const float *values)
{
    const float keep = values[0], take1 = values[1], beta2 = values[2], take2 = values[3], root = values[4],
                epsilon = values[5], rate = values[6];
    const float first = form & FAR ? fmaf(take1 - 1, g - *a, g) : fmaf(take1, g - *a, *a);
    float second = *v * beta2;
    second = second + take2 * (g * g);
    *a = first;
    *v = second;
    return w * keep + rate * (first / (sqrtf(second) / root + epsilon));
}

INLINE uint16_t to_bfloat16(float w)
{
    uint32_t bits;
    memcpy(&bits, &w, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(w != w ? 0x7FC0 : rounded);
}

/* n values of one learner; with PULLS their corrections, or their distances from z if that follows learners, are added
 * to `total`, or written there without ADDS */
INLINE void update_values(const int form, float *restrict w, const float *restrict g, float *restrict state0,
                          float *restrict state1, const float *restrict z, float *restrict total,
                          uint16_t *restrict shadow, const Learner *own, int64_t decays, const Averaging *averaging,
                          int64_t n)
{
    const float correction = averaging->correction;
    const int follows = averaging->follows != 0;
    const float scale = own->gradient_scale, decay = own->decay;
    float values[VALUES];
    memcpy(values, own->values, sizeof values);
    if (form & ADAMW && !decays) values[0] = 1;
    for (int64_t i = 0; i < n; i++) {
        const float before = w[i], gradient = g[i] * scale;
        float after = form & ADAMW ? adamw(form, before, gradient, state0 + i, state1 + i, values)
                                   : sgd(form, before, gradient, state0 + i, values, decay);
        if (form & PULLS) {
            const float pulled = (before - z[i]) * correction;
            after -= pulled;
            const float moved = follows ? after - z[i] : pulled;
            total[i] = form & ADDS ? total[i] + moved : moved;
        }
        w[i] = after;
        if (form & HAS_SHADOW) shadow[i] = to_bfloat16(after);
    }
}

#define FORM(form)                                                                                                     \
    case form:                                                                                                         \
        update_values(form, w, g, state0, state1, z, total, shadow, own, v->decays, averaging, n);                     \
        break;
#define FORMS_OF(step)                                                                                                 \
    FORM(step)                                                                                                         \
    FORM(step | PULLS)                                                                                                 \
    FORM(step | PULLS | ADDS)                                                                                          \
    FORM(step | HAS_SHADOW)                                                                                            \
    FORM(step | HAS_SHADOW | PULLS)                                                                                    \
    FORM(step | HAS_SHADOW | PULLS | ADDS)

/* Values [at, at + n) of learner j's row */
static void update_row(int form, const Vector *v, const Learner *own, int64_t j, const Averaging *averaging, int64_t at,
                       int64_t n)
{
    const int64_t in_row = j * v->stride + at;
    float *w = v->weights + in_row, *total = v->total + at;
    float *state0 = v->state[0] ? v->state[0] + in_row : 0, *state1 = v->state[1] ? v->state[1] + in_row : 0;
    const float *g = v->gradients + j * v->gradient_stride + at, *z = v->z + at;
    uint16_t *shadow = v->shadow ? v->shadow + in_row : 0;
    switch (form) {
        FORMS_OF(0)
        FORMS_OF(DECAYS)
        FORMS_OF(MOMENTUM)
        FORMS_OF(MOMENTUM | DECAYS)
        FORMS_OF(MOMENTUM | NESTEROV)
        FORMS_OF(MOMENTUM | NESTEROV | DECAYS)
        FORMS_OF(ADAMW)
        FORMS_OF(ADAMW | FAR)
    }
}

/* z' = z + total + momentum * (z - z_prev); z_prev <- z; z <- z' */
static void move(float *restrict z, float *restrict z_prev, const float *restrict total, float momentum, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float step = (z[i] - z_prev[i]) * momentum;
        step = step + total[i];
        z_prev[i] = z[i];
        z[i] = z[i] + step;
    }
}

static int form_of(const Vector *v, const Learner *own)
{
    int form = v->shadow ? HAS_SHADOW : 0;
    if (own->function == 1) return form | (own->values[1] < 0.5f ? ADAMW : ADAMW | FAR);
    if (v->decays && own->decay != 0) form |= DECAYS;
    if (own->values[0] != 0) form |= own->values[2] != 0 ? MOMENTUM | NESTEROV : MOMENTUM;
    return form;
}

/* Values [begin, begin + n) of all rows, one row after the other; n <= CHUNK */
static void update_chunk(const Vector *v, const Learner *learners, int64_t num_learners, const Averaging *averaging,
                         int64_t begin, int64_t n)
{
    int pulls = averaging->averages ? PULLS : 0;
    learners += v->group * num_learners;
    for (int64_t j = 0; j < num_learners; j++) {
        if (learners[j].skipped) continue;
        update_row(form_of(v, learners + j) | pulls, v, learners + j, j, averaging, begin, n);
        if (pulls) pulls = PULLS | ADDS;
    }
    if (!averaging->averages) return;
    if (!(pulls & ADDS)) memset(v->total + begin, 0, (size_t)n * sizeof(float));
    if (!averaging->moves) return;
    if (averaging->share != 1)
        for (int64_t i = 0; i < n; i++) v->total[begin + i] *= averaging->share;
    move(v->z + begin, v->z_prev + begin, v->total + begin, averaging->momentum, n);
}

static void update_part(const Vector *vectors, int64_t num_vectors, const Learner *learners, int64_t num_learners,
                        const Averaging *averaging, int64_t part, int64_t num_parts)
{
    int64_t chunk = 0;
    for (int64_t i = 0; i < num_vectors; i++) {
        const int64_t count = vectors[i].count;
        int64_t chunks = (count + CHUNK - 1) / CHUNK;
        if (count >= LEAST_CHUNK * num_parts) chunks = (chunks + num_parts - 1) / num_parts * num_parts; /* as many each */
        const int64_t size = chunks ? ((count + chunks - 1) / chunks + 15) / 16 * 16 : 0; /* whole cache lines */
        for (int64_t begin = 0; begin < count; begin += size, chunk++)
            if (chunk % num_parts == part)
                update_chunk(vectors + i, learners, num_learners, averaging, begin,
                             count - begin < size ? count - begin : size);
    }
}

/* Gradient steps and corrections of the learners in all vectors, the corrections' sum, and the step of z by it if
 * `averaging` says so. OpenMP, as torch: its threads wait for work busily, and threads of another kind would find their
 * cores taken. */
void crossbow_update(const Vector *vectors, int64_t num_vectors, const Learner *learners, int64_t num_learners,
                     const Averaging *averaging, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++)
        update_part(vectors, num_vectors, learners, num_learners, averaging, part, num_threads);
}

static void sum_part(float *restrict total, const float *const *rows, int64_t num_rows, int64_t count, int64_t part,
                     int64_t num_parts)
{
    const int64_t end = count * (part + 1) / num_parts;
    for (int64_t at = count * part / num_parts; at < end; at += CHUNK) {
        const int64_t n = end - at < CHUNK ? end - at : CHUNK;
        memcpy(total + at, rows[0] + at, (size_t)n * sizeof(float));
        for (int64_t j = 1; j < num_rows; j++) {
            const float *restrict row = rows[j] + at;
            for (int64_t i = 0; i < n; i++) total[at + i] += row[i];
        }
    }
}

/* total <- the sum of the rows, in their order */
void crossbow_sum(float *total, const float *const *rows, int64_t num_rows, int64_t count, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++) sum_part(total, rows, num_rows, count, part, num_threads);
}

/* See `move` */
void crossbow_move(float *z, float *z_prev, const float *total, float momentum, int64_t count, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++) {
        const int64_t at = count * part / num_threads;
        move(z + at, z_prev + at, total + at, momentum, count * (part + 1) / num_threads - at);
    }
}

typedef double Four __attribute__((vector_size(32)));

static double sum_of_squares(const float *values, int64_t n)
{
    Four sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int k = 0; k < 4; k++) {
            const float *four = values + i + 4 * k;
            const Four wide = {four[0], four[1], four[2], four[3]};
            sums[k] += wide * wide;
        }
    const Four sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double rest = 0;
    for (; i < n; i++) rest += (double)values[i] * (double)values[i];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

/* The strips s = part, part + num_parts, ... of crossbow_sums_of_squares */
static void square_part(const Vector *vectors, int64_t num_vectors, double *sums, int64_t num_learners,
                        int64_t num_strips, int64_t part, int64_t num_parts)
{
    for (int64_t s = 0; s < num_learners * num_strips; s++)
        if (s % num_strips % num_parts == part) sums[s] = 0;
    for (int64_t i = 0, first = 0; i < num_vectors; first += (vectors[i++].count + READ_CHUNK - 1) / READ_CHUNK)
        for (int64_t j = 0; j < num_learners; j++) {
            const float *gradient = vectors[i].gradients + j * vectors[i].gradient_stride;
            int64_t strip = first + j;
            for (int64_t begin = 0; begin < vectors[i].count; begin += READ_CHUNK, strip++) {
                const int64_t left = vectors[i].count - begin;
                if (strip % num_strips % num_parts == part)
                    sums[j * num_strips + strip % num_strips] +=
                        sum_of_squares(gradient + begin, left < READ_CHUNK ? left : READ_CHUNK);
            }
        }
}

/* sums[j * num_strips + s] <- the sum of squares of strip s of learner j's gradient. Chunk c of the row is in strip
 * (j + c) % num_strips, whatever the number of threads, so that sums do not follow from it. */
void crossbow_sums_of_squares(const Vector *vectors, int64_t num_vectors, double *sums, int64_t num_learners,
                              int64_t num_strips, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++)
        square_part(vectors, num_vectors, sums, num_learners, num_strips, part, num_threads);
}
