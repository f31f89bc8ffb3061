/* Linear layers of several learners with a function after each, and the cross-entropy after them; see dense.py. */

#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "small.h"

enum { IDENTITY, RELU, TANH, SIGMOID };

/* One layer, N rows of I inputs and O outputs; each stride is from one learner to the next */
typedef struct {
    int64_t inputs, outputs, function;
    const float *weights, *bias; /* [O, I] and, or null, [O] */
    int64_t weights_stride, bias_stride;
    float *values;     /* after the function, [K, N, ld]: rows are padded to whole tiles but for the last layer's */
    float *d_weights, *d_bias; /* [K, O, I] and [K, O], or null */
} Layer;

typedef struct {
    int64_t num_layers, rows;
    const Layer *layers;
    const float *inputs; /* [N, I] */
    int64_t inputs_stride;
    const float *d_outputs; /* [K, N, O] */
    float *d_inputs;        /* [K, N, I], or null */
    float *scratch;         /* `scratch_size` values for each thread */
    int64_t scratch_size;
} Chain;

static int64_t width_in_memory(const Chain *o, int64_t layer)
{
    const int64_t width = o->layers[layer].outputs;
    return layer == o->num_layers - 1 ? width : padded(width);
}

static void apply(int64_t function, float *x, int64_t count)
{
    switch (function) {
    case RELU:
        for (int64_t i = 0; i < count; i++) x[i] = rectified(x[i]);
        break;
    case TANH:
        for (int64_t i = 0; i < count; i++) x[i] = hyperbolic_tangent(x[i]);
        break;
    case SIGMOID:
        for (int64_t i = 0; i < count; i++) x[i] = sigmoid(x[i]);
        break;
    }
}

/* Gradients of what a function was given, from those of its values `y` */
static void apply_back(int64_t function, const float *restrict y, float *restrict d, int64_t count)
{
    switch (function) {
    case RELU:
        for (int64_t i = 0; i < count; i++) d[i] = y[i] <= 0 ? 0 : d[i];
        break;
    case TANH:
        for (int64_t i = 0; i < count; i++) d[i] *= 1 - y[i] * y[i];
        break;
    case SIGMOID:
        for (int64_t i = 0; i < count; i++) d[i] *= y[i] * (1 - y[i]);
        break;
    }
}

static void forward(const Chain *o, int64_t learner, float *scratch)
{
    const float *x = o->inputs + learner * o->inputs_stride;
    int64_t ldx = o->layers[0].inputs;
    for (int64_t l = 0; l < o->num_layers; l++) {
        const Layer *own = o->layers + l;
        const int64_t in = own->inputs, out = own->outputs, columns = padded(out), ldy = width_in_memory(o, l);
        const float *weights = own->weights + learner * own->weights_stride;
        float *bias = scratch, *turned = scratch + columns, *y = own->values + learner * o->rows * ldy;
        memset(bias, 0, (size_t)columns * sizeof(float));
        if (own->bias) memcpy(bias, own->bias + learner * own->bias_stride, (size_t)out * sizeof(float));
        transpose(weights, out, in, turned);
        product((Matrix){x, ldx, 1}, turned, columns, bias, 0, y, ldy, o->rows, in, ldy);
        apply(own->function, y, o->rows * ldy);
        x = y, ldx = ldy;
    }
}

/* A copy [rows, padded(columns)] of [rows, columns], or itself where it has whole tiles */
static const float *whole(const float *from, int64_t rows, int64_t columns, float *to)
{
    const int64_t wide = padded(columns);
    if (wide == columns) return from;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * wide, from + i * columns, (size_t)columns * sizeof(float));
        memset(to + i * wide + columns, 0, (size_t)(wide - columns) * sizeof(float));
    }
    return to;
}

static void backward(const Chain *o, int64_t learner, float *scratch)
{
    const int64_t rows = o->rows, last = o->num_layers - 1, outputs = o->layers[last].outputs;
    int64_t widest = 0;
    for (int64_t l = 0; l <= last; l++) widest = padded(o->layers[l].outputs) > widest ? padded(o->layers[l].outputs) : widest;
    float *d = scratch, *d_before = scratch + rows * widest, *copy = scratch + 2 * rows * widest;
    memcpy(d, o->d_outputs + learner * rows * outputs, (size_t)(rows * outputs) * sizeof(float));
    for (int64_t l = last; l >= 0; l--) {
        const Layer *own = o->layers + l;
        const int64_t in = own->inputs, out = own->outputs, ldd = width_in_memory(o, l), wide = padded(in);
        apply_back(own->function, own->values + learner * rows * ldd, d, rows * ldd);
        if (own->d_bias) {
            float *sums = own->d_bias + learner * out;
            memset(sums, 0, (size_t)out * sizeof(float));
            for (int64_t i = 0; i < rows; i++)
                for (int64_t n = 0; n < out; n++) sums[n] += d[i * ldd + n];
        }
        if (own->d_weights) {
            const float *x = l ? own[-1].values + learner * rows * wide
                               : whole(o->inputs + learner * o->inputs_stride, rows, in, copy);
            product((Matrix){d, 1, ldd}, x, wide, 0, 0, own->d_weights + learner * out * in, in, out, rows, in);
        }
        if (l || o->d_inputs) {
            const float *weights = whole(own->weights + learner * own->weights_stride, out, in, copy);
            float *to = l ? d_before : o->d_inputs + learner * rows * in, *swapped = d;
            const int64_t ld = l ? wide : in;
            product((Matrix){d, ldd, 1}, weights, wide, 0, 0, to, ld, rows, out, ld);
            d = d_before, d_before = swapped;
        }
    }
}

static int64_t this_thread(void)
{
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* OpenMP, as torch: its threads wait for work busily, so that threads of another kind would find their cores taken. */
void crossbow_dense_forward(const Chain *chain, int64_t num_learners, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t j = 0; j < num_learners; j++) forward(chain, j, chain->scratch + this_thread() * chain->scratch_size);
}

void crossbow_dense_backward(const Chain *chain, int64_t num_learners, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t j = 0; j < num_learners; j++) backward(chain, j, chain->scratch + this_thread() * chain->scratch_size);
}

/* Mean losses, right predictions and gradients of the sum of losses, as engine/kernels/cross_entropy.py has them */
typedef struct {
    int64_t rows, classes, ignored;
    const float *outputs;   /* [K, B, C] */
    const int64_t *targets; /* [B] */
    int64_t targets_stride;
    float *losses, *gradient; /* [K], [K, B, C] */
    int64_t *num_correct;     /* [K] */
    int64_t num_unknown;      /* not zero if there are targets that are no class */
} Loss;

enum { LANES = 8 }; /* reduced side by side, as a compiler does not reorder sums by itself */

static float largest_of(const float *x, int64_t count, int32_t *has_nan)
{
    float lanes[LANES], largest = -INFINITY;
    int32_t nans[LANES] = {0};
    for (int i = 0; i < LANES; i++) lanes[i] = -INFINITY;
    *has_nan = 0;
    for (; count >= LANES; count -= LANES, x += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] = x[i] > lanes[i] ? x[i] : lanes[i], nans[i] |= x[i] != x[i];
    for (; count > 0; count--, x++) largest = *x > largest ? *x : largest, *has_nan |= *x != *x;
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest, *has_nan |= nans[i];
    return largest;
}

static float sum_of(const float *x, int64_t count)
{
    float lanes[LANES] = {0}, sum = 0;
    for (; count >= LANES; count -= LANES, x += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += x[i];
    for (; count > 0; count--, x++) sum += *x;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

static int64_t cross_entropy(const Loss *o, int64_t learner)
{
    const int64_t rows = o->rows, classes = o->classes, *targets = o->targets + learner * o->targets_stride;
    int64_t counted = 0, correct = 0, unknown = 0;
    double total = 0;
    for (int64_t b = 0; b < rows; b++) counted += targets[b] != o->ignored;
    for (int64_t b = 0; b < rows; b++) {
        const int64_t target = targets[b], at = (learner * rows + b) * classes, is_class = target >= 0 && target < classes;
        const float *x = o->outputs + at, weight = target == o->ignored ? 0 : 1 / (float)counted;
        float *d = o->gradient + at;
        int32_t has_nan;
        const float largest = largest_of(x, classes, &has_nan);
        int64_t guess = 0;
        while (guess < classes && x[guess] != largest) guess++;
        /* As by torch, what is masked gets no gradient, not even a subnormal one. */
        for (int64_t c = 0; c < classes; c++) d[c] = x[c] - largest < -87 ? 0 : exponential(x[c] - largest);
        const float sum = sum_of(d, classes);
        if (target != o->ignored) total += is_class ? logf(sum) - (x[target] - largest) : NAN;
        unknown += !is_class && target != o->ignored;
        correct += guess == target && !has_nan && -INFINITY < largest && largest < INFINITY;
        for (int64_t c = 0; c < classes; c++) d[c] *= weight / sum;
        if (is_class) d[target] -= weight;
    }
    o->losses[learner] = (float)(total / (double)counted);
    o->num_correct[learner] = correct;
    return unknown;
}

void crossbow_cross_entropy(Loss *loss, int64_t num_learners, int64_t num_threads)
{
    int64_t unknown = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(+ : unknown)
    for (int64_t j = 0; j < num_learners; j++) unknown += cross_entropy(loss, j);
    loss->num_unknown = unknown;
}
