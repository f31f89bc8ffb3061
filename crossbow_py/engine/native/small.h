/* Products and functions of small layers, for recurrent.c and dense.c. */

#include <stdint.h>

#if defined(__AVX512VL__) || defined(__aarch64__) /* 32 registers of vectors */
#define MOST_ROWS 8
#else
#define MOST_ROWS 4
#endif

#ifdef __x86_64__ /* else GCC loads them again for each use */
#define IN_REGISTERS(a, b) __asm__("" : "+x"(a), "+x"(b))
#else
#define IN_REGISTERS(a, b)
#endif

#define TILE 16 /* columns */
#define PANEL (8 * TILE) /* columns of which a block of rows stays in the cache */

/* Whether learners run side by side: a compiler may know no OpenMP */
int crossbow_has_threads(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

static inline int64_t padded(int64_t columns) { return (columns + TILE - 1) / TILE * TILE; }

/* e^x within 2 units in the last place for |x| <= 87; beyond, e^87 and e^-87 */
static inline float exponential(float x)
{
    union { float value; int32_t bits; } scale;
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float count = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded */
    const float r = (x - count * 0.693359375f) + count * 2.12194440e-4f;
    scale.bits = ((int32_t)count + 127) << 23;
    const float high = 0.041668393f + r * (0.008368781f + r * 0.0013814467f);
    const float inner = 0.49999994f + r * (0.1666652f + r * high);
    return scale.value * (1.0f + (r + r * r * inner));
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float hyperbolic_tangent(float x)
{
    const float square = x * x;
    const float high = -0.053743497f + square * (0.020650586f - square * 0.0057170447f);
    const float small = -0.33333284f + square * (0.13331491f + square * high);
    const float large = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return square < 0.390625f ? x + x * square * small : large;
}

static inline float rectified(float x) { return x > 0 || x != x ? x : 0; }

/* A matrix whose element [i, j] is `at[i * rows + j * columns]` */
typedef struct { const float *at; int64_t rows, columns; } Matrix;

/* Where a product begins, and where it ends: `start` may be null */
typedef struct { const float *start; int64_t ld_start; float *c; int64_t ldc; } Place;

static inline __attribute__((always_inline)) void tile(int rows, const float *a, int64_t a_rows, int64_t a_columns, const float *b,
                                                       int64_t ldb, int64_t inner, Place to, int64_t valid)
{
    Eight sums[MOST_ROWS][2];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < 2; v++) sums[i][v] = to.start ? *(const Eight *)(to.start + i * to.ld_start + 8 * v) : (Eight){0};
    for (int64_t k = 0; k < inner; k++, a += a_columns, b += ldb) {
        Eight first = *(const Eight *)b, second = *(const Eight *)(b + 8);
        IN_REGISTERS(first, second);
        for (int i = 0; i < rows; i++) {
            sums[i][0] += a[i * a_rows] * first;
            sums[i][1] += a[i * a_rows] * second;
        }
    }
    for (int i = 0; i < rows; i++) {
        if (valid >= TILE) {
            for (int v = 0; v < 2; v++) *(Eight *)(to.c + i * to.ldc + 8 * v) = sums[i][v];
        } else {
            for (int64_t n = 0; n < valid; n++) to.c[i * to.ldc + n] = sums[i][n / 8][n % 8];
        }
    }
}

/* Functions of their own, in which the loop's values stay in registers */
#define TILE_OF(name, count)                                                                                                 \
    static __attribute__((noinline)) void name(Matrix a, const float *b, int64_t ldb, int64_t inner, Place to, int64_t valid) \
    {                                                                                                                        \
        tile(count, a.at, a.rows, a.columns, b, ldb, inner, to, valid);                                                      \
    }
TILE_OF(tile_of_most, MOST_ROWS)
TILE_OF(tile_of_four, 4)
TILE_OF(tile_of_one, 1)

/* c [rows, columns] = start [rows, columns] + a [rows, inner] · b [inner, columns]. Rows of b, and of a start that is not
 * null, hold columns padded to whole tiles. */
static inline void product(Matrix a, const float *b, int64_t ldb, const float *start, int64_t ld_start, float *c, int64_t ldc,
                           int64_t rows, int64_t inner, int64_t columns)
{
    for (int64_t n0 = 0; n0 < columns; n0 += PANEL) {
        const int64_t end = n0 + PANEL < columns ? n0 + PANEL : columns;
        for (int64_t i = 0; i < rows;) {
            const int64_t left = rows - i, count = left >= MOST_ROWS ? MOST_ROWS : left >= 4 ? 4 : 1;
            const Matrix own = {a.at + i * a.rows, a.rows, a.columns};
            for (int64_t n = n0; n < end; n += TILE) {
                const Place to = {start ? start + i * ld_start + n : 0, ld_start, c + i * ldc + n, ldc};
                (count == 1 ? tile_of_one : count == 4 ? tile_of_four : tile_of_most)(own, b + n, ldb, inner, to, columns - n);
            }
            i += count;
        }
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#endif

#ifdef HAS_SHUFFLES
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LOW(a, b) SHUFFLED(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLED(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define EVEN(a, b) SHUFFLED(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define ODD(a, b) SHUFFLED(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define FIRST(a, b) SHUFFLED(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define LAST(a, b) SHUFFLED(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

static inline void transpose_eight(const float *from, int64_t ld_from, float *to, int64_t ld_to)
{
    Eight r[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) r[i] = *(const Eight *)(from + i * ld_from);
    for (int i = 0; i < 8; i += 2) pairs[i] = LOW(r[i], r[i + 1]), pairs[i + 1] = HIGH(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        fours[i] = EVEN(pairs[i], pairs[i + 2]), fours[i + 1] = ODD(pairs[i], pairs[i + 2]);
        fours[i + 2] = EVEN(pairs[i + 1], pairs[i + 3]), fours[i + 3] = ODD(pairs[i + 1], pairs[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        *(Eight *)(to + i * ld_to) = FIRST(fours[i], fours[i + 4]);
        *(Eight *)(to + (i + 4) * ld_to) = LAST(fours[i], fours[i + 4]);
    }
}
#endif

/* to [columns, padded(rows)], with zeros behind each row, from [rows, columns] */
static inline void transpose(const float *from, int64_t rows, int64_t columns, float *to)
{
    const int64_t wide = padded(rows);
    int64_t whole_rows = 0, whole_columns = 0;
#ifdef HAS_SHUFFLES
    whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
    for (int64_t k = 0; k < whole_columns; k += 8)
        for (int64_t n = 0; n < whole_rows; n += 8) transpose_eight(from + n * columns + k, columns, to + k * wide + n, wide);
#endif
    for (int64_t k = 0; k < columns; k++)
        for (int64_t n = k < whole_columns ? whole_rows : 0; n < wide; n++)
            to[k * wide + n] = n < rows ? from[n * columns + k] : 0;
}
