/* Dense layers of float32 in one fixed order of sums.

Each output begins at its bias (or 0) and adds its products one after the other, in the order of the inputs, each by one
fused multiply-add. So its bits depend neither on the rows beside it nor on the width of vectors, and every processor
with fused multiply-add gives the same. Nothing may be reordered or fused besides: -ffp-contract=off, no -ffast-math.

The file includes itself once for every set of instructions: the text below is the same for all, of vectors V of W
floats. Weights are [outputs, inputs] as torch's Linear has them, or [inputs, outputs] ("turned"). */

#ifndef V
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NONE, TANH, RELU };
#define API __attribute__((visibility("default")))
#define HIDDEN static inline __attribute__((always_inline, unused))

/* Memory of this thread that grows: [k, 2 W] panels of a matrix, aligned for vectors. */
static float *panel(long floats)
{
    static __thread float *held;
    static __thread long size;
    if (floats > size) {
        free(held);
        size = floats;
        held = aligned_alloc(64, (size * sizeof(float) + 63) & ~63L);
        if (!held) {
            size = 0;
            abort();
        }
    }
    return held;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, ISA)

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,fma")
#define ISA avx512
#define V __m512
#define W 16
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define ALL _mm512_set1_ps
#define FMA _mm512_fmadd_ps
#define MUL _mm512_mul_ps
#define ADD _mm512_add_ps
#define SUB _mm512_sub_ps
#define DIV _mm512_div_ps
#define LOWER(a, b) _mm512_min_ps(a, b) /* b where one is NaN */
#define HIGHER(a, b) _mm512_max_ps(a, b)
#define WHERE_ABOVE_0(x, y) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLE_UQ), y)
#include "kernel.c"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ISA avx2
#define V __m256
#define W 8
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define ALL _mm256_set1_ps
#define FMA _mm256_fmadd_ps
#define MUL _mm256_mul_ps
#define ADD _mm256_add_ps
#define SUB _mm256_sub_ps
#define DIV _mm256_div_ps
#define LOWER(a, b) _mm256_min_ps(a, b)
#define HIGHER(a, b) _mm256_max_ps(a, b)
#define WHERE_ABOVE_0(x, y) _mm256_and_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NLE_UQ), y)
#include "kernel.c"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("fma")
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ISA neon
#define V float32x4_t
#define W 4
#define LOAD vld1q_f32
#define STORE vst1q_f32
#define ALL vdupq_n_f32
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define MUL vmulq_f32
#define ADD vaddq_f32
#define SUB vsubq_f32
#define DIV vdivq_f32
#define LOWER(a, b) vbslq_f32(vcltq_f32(a, b), a, b)
#define HIGHER(a, b) vbslq_f32(vcgtq_f32(a, b), a, b)
#define WHERE_ABOVE_0(x, y) vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcleq_f32(x, vdupq_n_f32(0.0f))))
#include "kernel.c"
#endif

#define ISA scalar /* for comparison, and for processors that have fused multiply-add and nothing wider */
#define V float
#define W 1
#define LOAD(p) (*(p))
#define STORE(p, x) (*(p) = (x))
#define ALL(x) (x)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define SUB(a, b) ((a) - (b))
#define DIV(a, b) ((a) / (b))
#define LOWER(a, b) ((a) < (b) ? (a) : (b))
#define HIGHER(a, b) ((a) > (b) ? (a) : (b))
#define WHERE_ABOVE_0(x, y) (!((x) <= 0.0f) ? (y) : 0.0f)
#include "kernel.c"
#if defined(__x86_64__)
#pragma GCC pop_options
#endif

typedef void Forward(const float *, long, int, const int *, const float *const *, const float *const *, int, int, int,
                     float *const *);
typedef void Backward(const float *, long, int, const int *, const float *const *, int, int, int, float *const *,
                      const float *, float *const *, float *const *, float *, float *, float *);
static const struct Kernel {
    const char *name;
    Forward *forward;
    Backward *backward;
} kernels[] = {
#if defined(__x86_64__)
    {"avx512", forward_avx512, backward_avx512},
    {"avx2", forward_avx2, backward_avx2},
#elif defined(__aarch64__)
    {"neon", forward_neon, backward_neon},
#endif
    {"scalar", forward_scalar, backward_scalar},
};
static const struct Kernel *kernel;

static int runs(const char *name)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("fma"))
        return 0;
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2");
#endif
    return 1;
}

/* Chooses the instructions of this name, or with "" the widest; returns the name, 0 if this processor lacks them. */
API const char *choose(const char *name)
{
    for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if ((!*name || !strcmp(name, kernels[i].name)) && runs(kernels[i].name)) {
            kernel = kernels + i;
            return kernel->name;
        }
    return 0;
}

/* [rows, width[0]] -> out[l] [rows, width[l + 1]] of every layer; the first `activated` layers have the activation. */
API void forward(const float *x, long rows, int layers, const int *width, const float *const *weight,
                 const float *const *bias, int activation, int activated, int turned, float *const *out)
{
    kernel->forward(x, rows, layers, width, weight, bias, activation, activated, turned, out);
}

/* Gradients by `gradient` [rows, width[layers]] of the last output: of weights and biases (0: not wanted), and of x (0:
   not wanted). `spare` is two buffers of [rows, largest width]. */
API void backward(const float *x, long rows, int layers, const int *width, const float *const *weight, int activation,
                  int activated, int turned, float *const *out, const float *gradient, float *const *for_weight,
                  float *const *for_bias, float *for_x, float *spare0, float *spare1)
{
    kernel->backward(x, rows, layers, width, weight, activation, activated, turned, out, gradient, for_weight, for_bias,
                     for_x, spare0, spare1);
}

#else /* the text for one set of instructions */

#define N (2 * W) /* columns of a tile */
#if W == 1
#undef N
#define N 8
#define VECTORS 8
#else
#define VECTORS 2
#endif
#if W == 8
#define ROWS 6
#else
#define ROWS 8
#endif

/* tanh(x), within 2e-7: a rational function, even denominator and odd numerator, of x cut where tanh is 1. */
HIDDEN V NAME(tanh_of)(V x)
{
    const V top = ALL(7.90531110763549805f), bottom = ALL(-7.90531110763549805f);
    x = HIGHER(bottom, LOWER(top, x));
    V square = MUL(x, x), p = ALL(-2.76076847742355e-16f), q = ALL(1.19825839466702e-06f);
    p = FMA(square, p, ALL(2.00018790482477e-13f));
    p = FMA(square, p, ALL(-8.60467152213735e-11f));
    p = FMA(square, p, ALL(5.12229709037114e-08f));
    p = FMA(square, p, ALL(1.48572235717979e-05f));
    p = FMA(square, p, ALL(6.37261928875436e-04f));
    p = FMA(square, p, ALL(4.89352455891786e-03f));
    q = FMA(square, q, ALL(1.18534705686654e-04f));
    q = FMA(square, q, ALL(2.26843463243900e-03f));
    q = FMA(square, q, ALL(4.89352518554385e-03f));
    return DIV(MUL(x, p), q);
}

HIDDEN V NAME(activated)(V x, int act)
{
    return act == TANH ? NAME(tanh_of)(x) : act == RELU ? HIGHER(ALL(0.0f), x) : x;
}

/* A tile of R rows and N columns: y = act(a b + bias), or in a backward pass y = (a b) times the derivative of the
   activation, a function of its output `by`. `a` has a row a row (`along` 0), or a row a column (1). */
#define TILE(R)                                                                                                        \
    HIDDEN void JOIN(NAME(tile), R)(int k, const float *a, long lda, int along, const float *b, float *y, long ldy,    \
                                    int columns, const float *bias, int act, const float *by, long ldby)               \
    {                                                                                                                  \
        V sum[R][VECTORS];                                                                                             \
        float edge[N];                                                                                                 \
        memset(edge, 0, sizeof edge);                                                                                  \
        if (bias)                                                                                                      \
            memcpy(edge, bias, columns * sizeof(float));                                                               \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < VECTORS; c++)                                                                          \
                sum[r][c] = LOAD(edge + c * W);                                                                        \
        for (int i = 0; i < k; i++)                                                                                    \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)                                                        \
            {                                                                                                          \
                V one = ALL(along ? a[i * lda + r] : a[r * lda + i]);                                                  \
                _Pragma("GCC unroll 8") for (int c = 0; c < VECTORS; c++) sum[r][c] =                                  \
                    FMA(one, LOAD(b + (long)i * N + c * W), sum[r][c]);                                                \
            }                                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < VECTORS && c * W < columns; c++) {                                                     \
                V x = sum[r][c];                                                                                       \
                int here = columns - c * W < W ? columns - c * W : W;                                                  \
                if (by) {                                                                                              \
                    V out = NAME(some)(by + r * ldby + c * W, here);                                                   \
                    x = act == RELU ? WHERE_ABOVE_0(out, x)                                                            \
                        : act == TANH ? MUL(x, SUB(ALL(1.0f), MUL(out, out)))                                          \
                                      : x;                                                                             \
                } else                                                                                                 \
                    x = NAME(activated)(x, act);                                                                       \
                if (here == W)                                                                                         \
                    STORE(y + r * ldy + c * W, x);                                                                     \
                else {                                                                                                 \
                    STORE(edge, x);                                                                                    \
                    memcpy(y + r * ldy + c * W, edge, here * sizeof(float));                                           \
                }                                                                                                      \
            }                                                                                                          \
    }

/* The first n < W or all W floats; the others are 0. */
HIDDEN V NAME(some)(const float *x, int n)
{
    float part[W];
    if (n == W)
        return LOAD(x);
    memset(part, 0, sizeof part);
    memcpy(part, x, n * sizeof(float));
    return LOAD(part);
}

TILE(6)
TILE(8)
TILE(1)

/* y [m, n] = a [m, k] b [k, n], with bias and activation, or the derivative by the outputs `by` [m, n]; `along`: a is
   stored [k, m]; `turned`: b is stored [n, k]. */
static void NAME(product)(int along, int turned, long m, int n, int k, const float *a, long lda, const float *b,
                          long ldb, float *y, const float *bias, int act, const float *by)
{
    float *packed = panel((long)k * N);
    for (int j = 0; j < n; j += N) {
        int columns = n - j < N ? n - j : N;
        for (int i = 0; i < k; i++) {
            float *row = packed + (long)i * N;
            if (turned)
                for (int c = 0; c < columns; c++)
                    row[c] = b[(long)(j + c) * ldb + i];
            else
                memcpy(row, b + (long)i * ldb + j, columns * sizeof(float));
            if (columns < N)
                memset(row + columns, 0, (N - columns) * sizeof(float));
        }
#define AT(i) a + (along ? (i) : (i) * lda), lda, along, packed, y + (i) * n + j, n, columns, bias ? bias + j : 0, act
        long i = 0;
        for (; i + ROWS <= m; i += ROWS) /* AVX2 has 16 registers: 6 rows of 2 sums, 2 weights and an input */
            JOIN(NAME(tile), ROWS)(k, AT(i), by ? by + i * n + j : 0, n);
        for (; i < m; i++)
            JOIN(NAME(tile), 1)(k, AT(i), by ? by + i * n + j : 0, n);
#undef AT
    }
}

/* y [m, n] = act(x [m, k] w^T + bias) for few rows and w [n, k]: a vector holds one output of W rows, so that it is x
   that must be turned, and not the larger w. The same sums in the same order as `product`. */
static void NAME(few)(long m, int n, int k, const float *x, const float *w, float *y, const float *bias, int act)
{
    float *packed = panel((long)k * W);
    for (long i = 0; i < m; i += W) {
        int rows = m - i < W ? m - i : W;
        float lanes[8 * W];
        if (rows < W)
            memset(packed, 0, (long)k * W * sizeof(float));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < k; c++)
                packed[(long)c * W + r] = x[(i + r) * k + c];
        int j = 0;
        for (; j + 8 <= n; j += 8) {
            V sum[8];
            _Pragma("GCC unroll 8") for (int o = 0; o < 8; o++) sum[o] = ALL(bias[j + o]);
            for (int c = 0; c < k; c++) {
                V in = LOAD(packed + (long)c * W);
                _Pragma("GCC unroll 8") for (int o = 0; o < 8; o++) sum[o] =
                    FMA(ALL(w[(long)(j + o) * k + c]), in, sum[o]);
            }
            for (int o = 0; o < 8; o++)
                STORE(lanes + o * W, NAME(activated)(sum[o], act));
            for (int r = 0; r < rows; r++)
                for (int o = 0; o < 8; o++)
                    y[(i + r) * n + j + o] = lanes[o * W + r];
        }
        for (; j < n; j++) {
            V sum = ALL(bias[j]);
            for (int c = 0; c < k; c++)
                sum = FMA(ALL(w[(long)j * k + c]), LOAD(packed + (long)c * W), sum);
            STORE(lanes, NAME(activated)(sum, act));
            for (int r = 0; r < rows; r++)
                y[(i + r) * n + j] = lanes[r];
        }
    }
}

/* sums[j] = the sum of column j of x [m, n], row after row. */
static void NAME(column_sums)(const float *x, long m, int n, float *sums)
{
    for (int j = 0; j < n; j += W) {
        int here = n - j < W ? n - j : W;
        V sum = ALL(0.0f);
        float part[W];
        for (long i = 0; i < m; i++)
            sum = ADD(sum, NAME(some)(x + i * n + j, here));
        STORE(part, sum);
        memcpy(sums + j, part, here * sizeof(float));
    }
}

static void NAME(forward)(const float *x, long rows, int layers, const int *width, const float *const *weight,
                          const float *const *bias, int activation, int activated, int turned, float *const *out)
{
    for (int l = 0; l < layers; l++) {
        int k = width[l], n = width[l + 1], act = l < activated ? activation : NONE;
        const float *input = l ? out[l - 1] : x;
        if (turned && rows <= 2 * W)
            NAME(few)(rows, n, k, input, weight[l], out[l], bias[l], act);
        else
            NAME(product)(0, turned, rows, n, k, input, k, weight[l], turned ? k : n, out[l], bias[l], act, 0);
    }
}

static void NAME(backward)(const float *x, long rows, int layers, const int *width, const float *const *weight,
                           int activation, int activated, int turned, float *const *out, const float *gradient,
                           float *const *for_weight, float *const *for_bias, float *for_x, float *spare0, float *spare1)
{
    if (activated == layers && activation != NONE) { /* the last output has the activation, too */
        long size = rows * width[layers];
        const float *y = out[layers - 1];
        for (long i = 0; i < size; i++)
            spare0[i] = activation == RELU ? (y[i] <= 0.0f ? 0.0f : gradient[i]) : gradient[i] * (1.0f - y[i] * y[i]);
        gradient = spare0;
        spare0 = spare1;
        spare1 = (float *)gradient;
    }
    for (int l = layers - 1; l >= 0; l--) {
        int k = width[l], n = width[l + 1];
        const float *input = l ? out[l - 1] : x;
        if (for_weight) {
            if (turned)
                NAME(product)(1, 0, n, k, rows, gradient, n, input, k, for_weight[l], 0, NONE, 0);
            else
                NAME(product)(1, 0, k, n, rows, input, k, gradient, n, for_weight[l], 0, NONE, 0);
        }
        if (for_bias)
            NAME(column_sums)(gradient, rows, n, for_bias[l]);
        if (l || for_x) {
            float *before = l ? spare0 : for_x;
            NAME(product)(0, !turned, rows, k, n, gradient, n, weight[l], turned ? k : n, before, 0,
                          l && l - 1 < activated ? activation : NONE, l ? input : 0);
            gradient = before;
            spare0 = spare1;
            spare1 = before;
        }
    }
}

#undef ISA
#undef V
#undef W
#undef N
#undef ROWS
#undef VECTORS
#undef TILE
#undef LOAD
#undef STORE
#undef ALL
#undef FMA
#undef MUL
#undef ADD
#undef SUB
#undef DIV
#undef LOWER
#undef HIGHER
#undef WHERE_ABOVE_0
#endif
