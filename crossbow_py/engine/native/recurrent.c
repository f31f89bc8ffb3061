/* Recurrent layers of several learners, one direction of one layer over all time steps; see recurrent.py beside it.
 *
 * K learners, T steps, B batch, H hidden size, G the width of a cell's gates, in torch's order: 4H for LSTM (i, f, g, o),
 * 3H for GRU (r, z, n), H for a plain RNN. */

#include <string.h>

#include "small.h"

enum { LSTM, GRU, TANH, RELU };

typedef struct {
    int64_t kind, reverse, batch, steps, hidden, width;
    const float *inputs;  /* their products with weights, [K, B, T, G], with all biases but GRU's own */
    const float *weights; /* of states, [K, G, H] */
    const float *bias;    /* of GRU's product with states, [K, G], or null */
    float *states, *cells; /* before and after each step, [K, T + 1, B, H]; cells of an LSTM */
    float *gates;          /* after their functions, [K, T, B, G] */
    float *inner;          /* an LSTM's tanh(c), or a GRU's product with states in n, [K, T, B, H] */
    const float *d_outputs; /* gradients: of outputs, [K, B, T, H] */
    float *d_inputs;        /* of inputs, [K, B, T, G] */
    float *d_products;      /* of products with states, [K, T, B, G] */
    float *d_state, *d_cell; /* of the last states, and then of the first, [K, B, H] */
    float *scratch;          /* `scratch_size` values for each learner */
    int64_t scratch_size;
} Layer;

/* One row of a step: gates and states from products `p` with states and from `x` */
static void step(int64_t kind, int64_t size, const float *restrict x, const float *restrict p, const float *restrict h,
                 const float *restrict c, float *restrict gates, float *restrict inner, float *restrict h_next,
                 float *restrict c_next)
{
    switch (kind) {
    case LSTM:
        for (int64_t i = 0; i < size; i++) {
            const float in = sigmoid(p[i]), forget = sigmoid(p[size + i]);
            const float new = hyperbolic_tangent(p[2 * size + i]), out = sigmoid(p[3 * size + i]);
            gates[i] = in, gates[size + i] = forget, gates[2 * size + i] = new, gates[3 * size + i] = out;
            c_next[i] = forget * c[i] + in * new;
            inner[i] = hyperbolic_tangent(c_next[i]);
            h_next[i] = out * inner[i];
        }
        break;
    case GRU:
        for (int64_t i = 0; i < size; i++) {
            const float r = sigmoid(x[i] + p[i]), z = sigmoid(x[size + i] + p[size + i]);
            const float n = hyperbolic_tangent(x[2 * size + i] + r * p[2 * size + i]);
            gates[i] = r, gates[size + i] = z, gates[2 * size + i] = n;
            inner[i] = p[2 * size + i];
            h_next[i] = n + z * (h[i] - n);
        }
        break;
    case TANH:
        for (int64_t i = 0; i < size; i++) h_next[i] = hyperbolic_tangent(p[i]);
        break;
    case RELU:
        for (int64_t i = 0; i < size; i++) h_next[i] = rectified(p[i]);
        break;
    }
}

/* One row of a step backwards: gradients of inputs `dx`, of products `dp`, and in `dh` and `dc` those of the states
 * before it, but for what comes through the products */
static void step_back(int64_t kind, int64_t size, const float *restrict gates, const float *restrict inner,
                      const float *restrict h, const float *restrict c, const float *restrict h_next,
                      float *restrict dx, float *restrict dp, float *restrict dh, float *restrict dc)
{
    switch (kind) {
    case LSTM:
        for (int64_t i = 0; i < size; i++) {
            const float in = gates[i], forget = gates[size + i], new = gates[2 * size + i], out = gates[3 * size + i];
            const float of_cell = dc[i] + dh[i] * out * (1 - inner[i] * inner[i]);
            dx[i] = dp[i] = of_cell * new * in * (1 - in);
            dx[size + i] = dp[size + i] = of_cell * c[i] * forget * (1 - forget);
            dx[2 * size + i] = dp[2 * size + i] = of_cell * in * (1 - new * new);
            dx[3 * size + i] = dp[3 * size + i] = dh[i] * inner[i] * out * (1 - out);
            dc[i] = of_cell * forget;
            dh[i] = 0;
        }
        break;
    case GRU:
        for (int64_t i = 0; i < size; i++) {
            const float r = gates[i], z = gates[size + i], n = gates[2 * size + i];
            const float kept = dh[i] * z, dn = (dh[i] - kept) * (1 - n * n);
            dx[i] = dp[i] = dn * inner[i] * r * (1 - r);
            dx[size + i] = dp[size + i] = dh[i] * (h[i] - n) * z * (1 - z);
            dx[2 * size + i] = dn;
            dp[2 * size + i] = dn * r;
            dh[i] = kept;
        }
        break;
    case TANH:
        for (int64_t i = 0; i < size; i++) dx[i] = dp[i] = dh[i] * (1 - h_next[i] * h_next[i]), dh[i] = 0;
        break;
    case RELU:
        for (int64_t i = 0; i < size; i++) dx[i] = dp[i] = h_next[i] > 0 ? dh[i] : 0, dh[i] = 0;
        break;
    }
}

static void forward(const Layer *o, int64_t learner)
{
    const int64_t batch = o->batch, steps = o->steps, size = o->hidden, width = o->width, columns = padded(width);
    float *turned = o->scratch + learner * o->scratch_size, *products = turned + size * columns;
    const float *weights = o->weights + learner * width * size;
    transpose(weights, width, size, turned);
    memset(products, 0, (size_t)(batch * columns) * sizeof(float));
    for (int64_t s = 0; s < steps; s++) {
        const int64_t t = o->reverse ? steps - 1 - s : s, before = t + (o->reverse != 0), after = t + (o->reverse == 0);
        const int64_t now = (learner * steps + t) * batch, early = (learner * (steps + 1) + before) * batch;
        const int64_t late = (learner * (steps + 1) + after) * batch;
        for (int64_t b = 0; b < batch; b++) {
            const float *x = o->inputs + ((learner * batch + b) * steps + t) * width;
            float *p = products + b * columns;
            if (o->kind != GRU) memcpy(p, x, (size_t)width * sizeof(float));
            else if (o->bias) memcpy(p, o->bias + learner * width, (size_t)width * sizeof(float));
            else memset(p, 0, (size_t)width * sizeof(float));
        }
        product((Matrix){o->states + early * size, size, 1}, turned, columns, products, columns, products, columns, batch, size, columns);
        for (int64_t b = 0; b < batch; b++) {
            const int64_t in_gates = (now + b) * width, in_inner = (now + b) * size;
            step(o->kind, size, o->inputs + ((learner * batch + b) * steps + t) * width, products + b * columns,
                 o->states + (early + b) * size, o->cells + (early + b) * size, o->gates + in_gates,
                 o->inner + in_inner, o->states + (late + b) * size, o->cells + (late + b) * size);
        }
    }
}

static void backward(const Layer *o, int64_t learner)
{
    const int64_t batch = o->batch, steps = o->steps, size = o->hidden, width = o->width, columns = padded(size);
    float *weights = o->scratch + learner * o->scratch_size, *dh = weights + width * columns;
    float *dc = o->d_cell + learner * batch * size;
    for (int64_t n = 0; n < width; n++) {
        memset(weights + n * columns, 0, (size_t)columns * sizeof(float));
        memcpy(weights + n * columns, o->weights + (learner * width + n) * size, (size_t)size * sizeof(float));
    }
    memset(dh, 0, (size_t)(batch * columns) * sizeof(float));
    for (int64_t s = 0; s < steps; s++) {
        const int64_t t = o->reverse ? s : steps - 1 - s, before = t + (o->reverse != 0), after = t + (o->reverse == 0);
        const int64_t now = (learner * steps + t) * batch, early = (learner * (steps + 1) + before) * batch;
        const int64_t late = (learner * (steps + 1) + after) * batch;
        for (int64_t b = 0; b < batch; b++) {
            const int64_t row = (learner * batch + b) * steps + t, in_gates = (now + b) * width;
            float *own = dh + b * columns;
            for (int64_t i = 0; i < size; i++) own[i] += o->d_outputs[row * size + i];
            step_back(o->kind, size, o->gates + in_gates, o->inner + (now + b) * size, o->states + (early + b) * size,
                      o->cells + (early + b) * size, o->states + (late + b) * size, o->d_inputs + row * width,
                      o->d_products + in_gates, own, dc + b * size);
        }
        product((Matrix){o->d_products + now * width, width, 1}, weights, columns, dh, columns, dh, columns, batch, width, columns);
    }
    for (int64_t b = 0; b < batch; b++)
        memcpy(o->d_state + (learner * batch + b) * size, dh + b * columns, (size_t)size * sizeof(float));
}

/* OpenMP, as torch: its threads wait for work busily, so that threads of another kind would find their cores taken. */
void crossbow_recurrent_forward(const Layer *layer, int64_t num_learners, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t j = 0; j < num_learners; j++) forward(layer, j);
}

void crossbow_recurrent_backward(const Layer *layer, int64_t num_learners, int64_t num_threads)
{
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t j = 0; j < num_learners; j++) backward(layer, j);
}
