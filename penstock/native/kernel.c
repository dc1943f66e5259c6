/* Dense layers of float32 in one fixed order of sums.

Each output begins at its bias (or 0) and adds its products one after the other, in the order of the inputs, each by one
fused multiply-add. So its bits depend neither on the rows beside it nor on the width of vectors, and every processor
with fused multiply-add gives the same. Nothing may be reordered or fused besides: -ffp-contract=off, no -ffast-math.

The file includes itself once for every set of instructions: the text below is the same for all, of vectors V of W
floats. Functions of one number (exp, log, ...) are written out, too, for C libraries choose theirs by the processor;
compilers turn their loops into vectors. Weights are [outputs, inputs] as torch's Linear has them, or [inputs, outputs]
("turned"). */

#ifndef V
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NONE, TANH, RELU, ELU };
enum { EXP, LOG, LOG1P, TANH_OF, NORMAL, SIGMOID, ELU_OF };
#define API __attribute__((visibility("default")))
#define HIDDEN static inline __attribute__((always_inline, unused))

/* Memory of this thread that grows, aligned for vectors: PACKED for [k, 2 W] panels of a matrix and for working numbers,
   OUTPUTS for those of hidden layers, ACTED for what goes into a network that acts and comes out of it. */
enum { PACKED, OUTPUTS, ACTED };
static float *memory(int of, long floats)
{
    static __thread float *held[3];
    static __thread long size[3];
    if (floats > size[of]) {
        free(held[of]);
        size[of] = floats;
        held[of] = aligned_alloc(64, (floats * sizeof(float) + 63) & ~63L);
        if (!held[of])
            abort();
    }
    return held[of];
}

/* Four floats, and any four of those of two. */
typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t FourInts __attribute__((vector_size(16)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (FourInts){__VA_ARGS__})
#endif

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

typedef void Orthonormal(double *, long, long);
typedef void Squares(int, const float *const *, const long *, double *);
typedef void Adam(int, float *const *, const float *const *, float *const *, float *const *, const long *, const float *,
                  double, double, double, double, double, int);
typedef void Rmsprop(int, float *const *, const float *const *, float *const *, const long *, double, double, double,
                     double);
typedef void Apply(int, const float *, long, float *);
typedef void LogSoftmax(const float *, long, int, float *);
typedef void Categorical(const float *, long, int, const uint8_t *, const float *, int64_t, int64_t *, float *);
typedef void Gaussian(const float *, long, int, const float *, const float *, const float *, const float *, int,
                      float *, float *);
typedef void Control(const float *, long, int, int, float, const float *, const float *, const float *, float *);
typedef void Forward(const float *, long, int, const int *, const float *const *, const float *const *, int, int, int,
                     const float *const *, float *const *, float *const *);
typedef void Backward(const float *, long, int, const int *, const float *const *, int, int, int, const float *const *,
                      float *const *, float *const *, const float *, float *const *, float *const *, float *const *,
                      float *, float *, float *);
typedef void LayerNorm(const float *, long, int, const float *, const float *, int, float *, float *, float *);
typedef void LayerNormBack(const float *, const float *, long, int, const float *, int, const float *, const float *,
                           float *, float *, float *);
#define KERNEL(isa)                                                                                                    \
    {                                                                                                                  \
        #isa, forward_##isa, backward_##isa, squares_##isa, adam_##isa, rmsprop_##isa, apply_##isa,                 \
            orthonormal_##isa, log_softmax_##isa, categorical_##isa, gaussian_##isa, control_##isa, layer_norm_##isa,       \
            layer_norm_back_##isa                                                                                             \
    }
static const struct Kernel {
    const char *name;
    Forward *forward;
    Backward *backward;
    Squares *squares;
    Adam *adam;
    Rmsprop *rmsprop;
    Apply *apply;
    Orthonormal *orthonormal;
    LogSoftmax *log_softmax;
    Categorical *categorical;
    Gaussian *gaussian;
    Control *control;
    LayerNorm *layer_norm;
    LayerNormBack *layer_norm_back;
} kernels[] = {
#if defined(__x86_64__)
    KERNEL(avx512),
    KERNEL(avx2),
#elif defined(__aarch64__)
    KERNEL(neon),
#endif
    KERNEL(scalar),
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

/* _FUNCTIONS of library.py. */
API int version(void)
{
    return 6;
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

/* [rows, width[0]] -> out[l] [rows, width[l + 1]] of every layer; the first `activated` layers have the activation.
   `norm`: gain and shift in turn of the LayerNorm before each activation (0: none), of which `kept` takes the normalised
   numbers [rows, width[l + 1]] and the inverse deviations [rows] in turn, for `backward`. */
API void forward(const float *x, long rows, int layers, const int *width, const float *const *weight,
                 const float *const *bias, int activation, int activated, int turned, const float *const *norm,
                 float *const *kept, float *const *out)
{
    kernel->forward(x, rows, layers, width, weight, bias, activation, activated, turned, norm, kept, out);
}

/* The last of these outputs alone, for weights as torch's Linear has them; `parameter`: weight and bias in turn. */
API void last(const float *x, long rows, int layers, const int *width, const float *const *parameter, int activation,
              int activated, const float *const *norm, float *out)
{
    const float *weight[layers], *bias[layers];
    float *each[layers];
    long floats = 0;
    for (int l = 0; l < layers - 1; l++)
        floats += rows * width[l + 1];
    float *hidden = memory(OUTPUTS, floats);
    for (int l = 0; l < layers; l++) {
        weight[l] = parameter[2 * l];
        bias[l] = parameter[2 * l + 1];
        each[l] = hidden;
        hidden += rows * width[l + 1];
    }
    each[layers - 1] = out;
    kernel->forward(x, rows, layers, width, weight, bias, activation, activated, 1, norm, 0, each);
}

/* Gradients by `gradient` [rows, width[layers]] of the last output: of weights and biases (0: not wanted), and of x (0:
   not wanted), and of gains and shifts in turn (`for_norm`; 0: not wanted). `spare` is two buffers of [rows, largest
   width]. */
API void backward(const float *x, long rows, int layers, const int *width, const float *const *weight, int activation,
                  int activated, int turned, const float *const *norm, float *const *kept, float *const *out,
                  const float *gradient, float *const *for_weight, float *const *for_bias, float *const *for_norm,
                  float *for_x, float *spare0, float *spare1)
{
    kernel->backward(x, rows, layers, width, weight, activation, activated, turned, norm, kept, out, gradient,
                     for_weight, for_bias, for_norm, for_x, spare0, spare1);
}

/* y = gain (x - mean) / root(variance + 1e-5) + shift for each row of x [rows, n] (Ba et al. 2016, equation 4), and what
   `layer_norm_back` needs: `normal` [rows, n] and `inverse` [rows]. y may be x. */
API void layer_norm(const float *x, long rows, int n, const float *gain, const float *shift, float *y, float *normal,
                    float *inverse)
{
    kernel->layer_norm(x, rows, n, gain, shift, NONE, y, normal, inverse);
}

/* The gradient of x by that of y, and those of gain and shift [n] (0: not wanted). */
API void layer_norm_back(const float *gradient, long rows, int n, const float *gain, const float *normal,
                         const float *inverse, float *for_x, float *for_gain, float *for_shift)
{
    kernel->layer_norm_back(gradient, 0, rows, n, gain, NONE, normal, inverse, for_x, for_gain, for_shift);
}

/* y = f(x), element by element, for f of the list at the top: EXP, LOG, LOG1P, TANH_OF, SIGMOID, ELU_OF, and NORMAL, the
   standard normal at whose left x of all lies. */
API void apply(int f, const float *x, long size, float *y)
{
    kernel->apply(f, x, size, y);
}

/* sum[i] = the sum of the squares of the size[i] numbers at x[i]. */
API void squares(int count, const float *const *x, const long *size, double *sum)
{
    kernel->squares(count, x, size, sum);
}

/* A step of Adam (Kingma and Ba 2015, algorithm 1) for each of `count` parameters of size[i] numbers, of which step[i]
   counts the steps, this one too. `decay` of the parameters goes into their gradients, or with `decoupled` is taken off
   beside them. Moments that are subnormal become 0, since processors are slow on them. */
API void adam(int count, float *const *parameter, const float *const *gradient, float *const *average,
              float *const *square, const long *size, const float *step, double lr, double beta1, double beta2,
              double eps, double decay, int decoupled)
{
    kernel->adam(count, parameter, gradient, average, square, size, step, lr, beta1, beta2, eps, decay, decoupled);
}

/* A step of RMSprop, p -= lr g / (root of the mean square + eps), for each of `count` parameters of size[i] numbers. */
API void rmsprop(int count, float *const *parameter, const float *const *gradient, float *const *square,
                 const long *size, double lr, double alpha, double eps, double decay)
{
    kernel->rmsprop(count, parameter, gradient, square, size, lr, alpha, eps, decay);
}

/* Sum trees (penstock/replay/sum_tree.py), whose nodes have eight children. Levels are given from the leaves up. */

/* Sets n leaves and the sums above them. `node` [n]: the leaves, written over. */
API void tree_set(int levels, double *const *level, long n, int64_t *node, const double *value)
{
    for (long i = 0; i < n; i++)
        level[0][node[i]] = value[i];
    for (int l = 1; l < levels; l++)
        for (long i = 0; i < n; i++) {
            const double *x = level[l - 1] + 8 * (node[i] >>= 3);
            level[l][node[i]] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        }
}

static long within(long at, long last)
{
    return at < 0 ? 0 : at > last ? last : at;
}

/* The leaves [n] at n cumulative sums, counted from 1, and their values. `before` [top + 2]: before[k + 1] is the sum of
   the top's first k. `level`: each with a block of zeros before and behind, to which sums outside come. */
API void tree_find(int levels, const double *const *level, const long *size, const double *before, long n,
                   const double *mass, int64_t *node, double *value)
{
    for (long i = 0; i < n; i++) {
        long low = 0, count = size[levels - 1] - 16 + 1;
        while (count > 0) { /* the first of `before` but its own first that is larger */
            long half = count >> 1, above = before[1 + low + half] > mass[i];
            low = above ? low : low + half + 1;
            count = above ? half : count - half - 1;
        }
        node[i] = low;
        value[i] = mass[i] - before[low];
    }
    for (int l = levels - 2; l >= 0; l--)
        for (long i = 0; i < n; i++) {
            const double *x = level[l] + within(8 * node[i], size[l] - 8);
            double rest = value[i];
            int child = 0;
            for (; child < 7 && !(rest - x[child] < 0.0); child++)
                rest -= x[child];
            node[i] = 8 * node[i] - 7 + child;
            value[i] = rest;
            if (l)
                __builtin_prefetch(level[l - 1] + within(8 * node[i], size[l - 1] - 8));
        }
    for (long i = 0; i < n; i++)
        value[i] = level[0][within(7 + node[i], size[0] - 1)];
}

/* Makes rows [rows, n], rows <= n, orthogonal and of length 1, in place (Gram-Schmidt, each row twice). */
API void orthonormal(double *x, long rows, long n)
{
    kernel->orthonormal(x, rows, n);
}

/* log of the softmax of each row [rows, n]. */
API void log_softmax(const float *x, long rows, int n, float *y)
{
    kernel->log_softmax(x, rows, n, y);
}

/* A choice for each row of logits [rows, n] and its log-probability: by inverse CDF of `uniform` [rows], or the likeliest
   where that is 0. Choices whose `mask` [rows, n] is 0 are never made (mask 0: all are legal). */
API void categorical(const float *logits, long rows, int n, const uint8_t *mask, const float *uniform, int64_t start,
                     int64_t *action, float *logp)
{
    kernel->categorical(logits, rows, n, mask, uniform, start, action, logp);
}

/* Actions [rows, n] center + half x and their log densities [rows], x normal about `mean` [rows, n] with deviations
   exp(log_std) [n], by inverse CDF of `uniform` [rows, n] (0: x is the mean), pressed through tanh where `squash`. */
API void gaussian(const float *mean, long rows, int n, const float *log_std, const float *center, const float *half,
                  const float *uniform, int squash, float *action, float *logp)
{
    kernel->gaussian(mean, rows, n, log_std, center, half, uniform, squash, action, logp);
}

/* Actions [rows, n] center + half u of an off-policy actor with outputs [rows, n]: u = tanh(output) + spread z, cut at
   -1 and 1; or with `gaussian` of outputs [rows, 2 n], means and log deviations: u = tanh(mean + deviation z). z is
   normal by inverse CDF of `uniform` [rows, n]; 0: z is 0. */
API void control(const float *out, long rows, int n, int gaussian, float spread, const float *uniform,
                 const float *center, const float *half, float *action)
{
    kernel->control(out, rows, n, gaussian, spread, uniform, center, half, action);
}

/* How an agent acts (penstock/native/acting.py has the same fields): a network as `last` has it, and then a head. */
enum { CATEGORICAL, GAUSSIAN, SQUASHED, POINT, CONTROL, GREEDY };
struct Acting {
    int head, layers, activation, n; /* all layers but the last are activated; n: choices, or elements of a box */
    const int *width;
    const float *const *parameter;
    const double *mean, *scale; /* [width[0]] of the observations' normaliser; 0: none */
    double clip;
    const float *log_std, *center, *half; /* [n] of boxes */
    int64_t start; /* the number of the first choice */
    float spread; /* of a POINT's noise */
    const float *epsilon; /* [epsilons] of GREEDY, by slot */
    long epsilons;
    const float *const *norm; /* gain and shift in turn of the LayerNorm before each activation; 0: none */
    int evaluates;
    float evaluated; /* the chance of slots below 0, where they are evaluated by chance */
};

/* Actions [rows, ...] for observations x [rows, width[0]] by `uniform` numbers, as the heads above take them, and where
   they have them log-probabilities [rows]. GREEDY: the first of the largest outputs, or by uniform [rows, 3] (chance,
   choice, number of the slot) any other. */
API void act(const struct Acting *by, const float *x, long rows, const float *uniform, void *action, float *logp)
{
    int k = by->width[0], m = by->width[by->layers], n = by->n;
    float *out = memory(ACTED, rows * (k + m)), *seen = out + rows * m;
    int64_t *chosen = action;
    if (by->mean) {
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < k; i++) {
                double z = ((double)x[r * k + i] - by->mean[i]) * by->scale[i];
                seen[r * k + i] = (float)(z > by->clip ? by->clip : z < -by->clip ? -by->clip : z);
            }
        x = seen;
    }
    last(x, rows, by->layers, by->width, by->parameter, by->activation, by->layers - 1, by->norm, out);
    switch (by->head) {
    case CATEGORICAL: kernel->categorical(out, rows, n, 0, uniform, by->start, chosen, logp); return;
    case GAUSSIAN:
    case SQUASHED:
        kernel->gaussian(out, rows, n, by->log_std, by->center, by->half, uniform, by->head == SQUASHED, action, logp);
        return;
    case POINT:
    case CONTROL:
        kernel->control(out, rows, n, by->head == CONTROL, by->spread, uniform, by->center, by->half, action);
        return;
    }
    for (long r = 0; r < rows; r++) {
        const float *q = out + r * n, *u = uniform + 3 * r;
        int best = 0;
        for (int i = 1; i < n && q[best] == q[best]; i++)
            best = q[i] > q[best] || q[i] != q[i] ? i : best;
        if (uniform) {
            long slot = (long)u[2] % by->epsilons;
            float chance = by->epsilon[slot < 0 ? slot + by->epsilons : slot];
            if (u[0] < (u[2] < 0.0f && by->evaluates ? by->evaluated : chance))
                best = (int)(u[1] * n);
        }
        chosen[r] = best + by->start;
    }
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
#if W == 8 /* AVX2 has 16 registers: 6 rows of 2 sums, or 12 of one, 2 weights and an input */
#define ROWS 6
#define NARROW 12
#else
#define ROWS 8
#define NARROW 16
#endif

/* tanh(x), within 2e-7: a rational function, even denominator and odd numerator, of x cut at 7.9; 1 from 8.3 on. */
HIDDEN V NAME(tanh_of)(V given)
{
    const V top = ALL(7.90531110763549805f), bottom = ALL(-7.90531110763549805f), one = ALL(1.0f), far = ALL(8.3f);
    V x = HIGHER(bottom, LOWER(top, given));
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
    V y = DIV(MUL(x, p), q);
    y = ADD(y, WHERE_ABOVE_0(SUB(given, far), SUB(one, y)));
    return SUB(y, WHERE_ABOVE_0(SUB(SUB(ALL(0.0f), far), given), ADD(one, y)));
}

HIDDEN float NAME(exp_of)(float x);

/* max(x, 0) + (e^min(x, 0) - 1), of which one part is always 0 (Clevert et al. 2016, equation 15, for alpha = 1). */
HIDDEN V NAME(elu_of)(V x)
{
    float part[W];
    STORE(part, LOWER(ALL(0.0f), x));
    for (int i = 0; i < W; i++)
        part[i] = NAME(exp_of)(part[i]);
    return ADD(HIGHER(ALL(0.0f), x), SUB(LOAD(part), ALL(1.0f)));
}

HIDDEN V NAME(activated)(V x, int act)
{
    return act == TANH ? NAME(tanh_of)(x) : act == RELU ? HIGHER(ALL(0.0f), x) : act == ELU ? NAME(elu_of)(x) : x;
}

/* The gradient before the activation by that behind it and its output. */
HIDDEN V NAME(before)(V gradient, V out, int act)
{
    return act == RELU   ? WHERE_ABOVE_0(out, gradient)
           : act == TANH ? MUL(gradient, SUB(ALL(1.0f), MUL(out, out)))
           : act == ELU  ? MUL(gradient, ADD(LOWER(ALL(0.0f), out), ALL(1.0f)))
                         : gradient;
}

/* A tile of R rows and `wide` vectors of columns, of panels of N: y = act(a b + bias), or in a backward pass y = (a b) times the derivative of the
   activation, a function of its output `by`. `a` has a row a row (`along` 0), or a row a column (1). */
#define TILE_NAME(R, wide) JOIN(JOIN(NAME(tile), R), wide)
#define TILE(R, wide)                                                                                                  \
    HIDDEN void TILE_NAME(R, wide)(int k, const float *a, long lda, int along, const float *b, float *y, long ldy,     \
                                   int columns, const float *bias, int act, const float *by, long ldby)               \
    {                                                                                                                  \
        V sum[R][wide];                                                                                             \
        float edge[N];                                                                                                 \
        memset(edge, 0, sizeof edge);                                                                                  \
        if (bias)                                                                                                      \
            memcpy(edge, bias, columns * sizeof(float));                                                               \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < wide; c++)                                                                             \
                sum[r][c] = LOAD(edge + c * W);                                                                        \
        for (int i = 0; i < k; i++)                                                                                    \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                       \
            {                                                                                                          \
                V one = ALL(along ? a[i * lda + r] : a[r * lda + i]);                                                  \
                _Pragma("GCC unroll 8") for (int c = 0; c < wide; c++) sum[r][c] =                                     \
                    FMA(one, LOAD(b + (long)i * N + c * W), sum[r][c]);                                                \
            }                                                                                                          \
        for (int r = 0; r < R; r++)                                                                                    \
            for (int c = 0; c < wide && c * W < columns; c++)    {                                                     \
                V x = sum[r][c];                                                                                       \
                int here = columns - c * W < W ? columns - c * W : W;                                                  \
                if (by) {                                                                                              \
                    x = NAME(before)(x, NAME(some)(by + r * ldby + c * W, here), act);                                 \
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

TILE(ROWS, VECTORS)
TILE(1, VECTORS)
TILE(NARROW, 1) /* for panels of one vector or less: outputs of heads, and weights of few inputs */
TILE(1, 1)

/* packed [k, N] = x [columns, k] turned, four by four where there are as many. */
HIDDEN void NAME(turn)(int columns, int k, const float *x, long ldx, float *packed)
{
    int c = 0;
    for (; c + 4 <= columns; c += 4) {
        int i = 0;
        for (; i + 4 <= k; i += 4) {
            Four in[4], low, high, low2, high2;
            for (int r = 0; r < 4; r++)
                memcpy(in + r, x + (long)(c + r) * ldx + i, sizeof *in);
            low = PICK(in[0], in[1], 0, 4, 1, 5);
            high = PICK(in[0], in[1], 2, 6, 3, 7);
            low2 = PICK(in[2], in[3], 0, 4, 1, 5);
            high2 = PICK(in[2], in[3], 2, 6, 3, 7);
            in[0] = PICK(low, low2, 0, 1, 4, 5);
            in[1] = PICK(low, low2, 2, 3, 6, 7);
            in[2] = PICK(high, high2, 0, 1, 4, 5);
            in[3] = PICK(high, high2, 2, 3, 6, 7);
            for (int r = 0; r < 4; r++)
                memcpy(packed + (long)(i + r) * N + c, in + r, sizeof *in);
        }
        for (; i < k; i++)
            for (int r = 0; r < 4; r++)
                packed[(long)i * N + c + r] = x[(long)(c + r) * ldx + i];
    }
    for (; c < columns; c++)
        for (int i = 0; i < k; i++)
            packed[(long)i * N + c] = x[(long)c * ldx + i];
}

/* y [m, n] = a [m, k] b [k, n], with bias and activation, or the derivative by the outputs `by` [m, n]; `along`: a is
   stored [k, m]; `turned`: b is stored [n, k]. */
static void NAME(product)(int along, int turned, long m, int n, int k, const float *a, long lda, const float *b,
                          long ldb, float *y, const float *bias, int act, const float *by)
{
    float *packed = memory(PACKED, (long)k * N);
    for (int j = 0; j < n; j += N) {
        int columns = n - j < N ? n - j : N;
        if (columns < N)
            memset(packed, 0, (long)k * N * sizeof(float));
        if (turned)
            NAME(turn)(columns, k, b + (long)j * ldb, ldb, packed);
        else
            for (int i = 0; i < k; i++)
                memcpy(packed + (long)i * N, b + (long)i * ldb + j, columns * sizeof(float));
#define AT(i) a + (along ? (i) : (i) * lda), lda, along, packed, y + (i) * n + j, n, columns, bias ? bias + j : 0, act
        long i = 0;
        if (columns > W) {
            for (; i + ROWS <= m; i += ROWS)
                TILE_NAME(ROWS, VECTORS)(k, AT(i), by ? by + i * n + j : 0, n);
            for (; i < m; i++)
                TILE_NAME(1, VECTORS)(k, AT(i), by ? by + i * n + j : 0, n);
        } else {
            for (; i + NARROW <= m; i += NARROW)
                TILE_NAME(NARROW, 1)(k, AT(i), by ? by + i * n + j : 0, n);
            for (; i < m; i++)
                TILE_NAME(1, 1)(k, AT(i), by ? by + i * n + j : 0, n);
        }
#undef AT
    }
}

/* y [m, n] = act(x [m, k] w^T + bias) for few rows and w [n, k]: a vector holds one output of W rows, so that it is x
   that must be turned, and not the larger w. The same sums in the same order as `product`. */
static void NAME(few)(long m, int n, int k, const float *x, const float *w, float *y, const float *bias, int act)
{
    float *packed = memory(PACKED, (long)k * W);
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

#define LANES 16 /* partial sums, which any width of vectors can hold: lane i has the numbers i, i + LANES, ... */
#define EACH_VECTOR(...) /* with its first number i, how many it has (here), and its lanes c */                         \
    {                                                                                                                  \
        int done = 0;                                                                                                  \
        for (; done + LANES <= n; done += LANES)                                                                       \
            _Pragma("GCC unroll 16") for (int c = 0; c < LANES / W; c++)                                               \
            {                                                                                                          \
                const int i = done + c * W, here = W;                                                                  \
                __VA_ARGS__                                                                                            \
            }                                                                                                          \
        _Pragma("GCC unroll 16") for (int c = 0; c < LANES / W; c++)                                                   \
        {                                                                                                              \
            const int i = done + c * W, here = n - i < W ? n - i : W;                                                  \
            if (here > 0) {                                                                                            \
                __VA_ARGS__                                                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }
HIDDEN float NAME(total)(const V *sum)
{
    float lane[LANES];
    for (int c = 0; c < LANES / W; c++)
        STORE(lane + c * W, sum[c]);
    Four part[4];
    memcpy(part, lane, sizeof lane);
    part[0] = (part[0] + part[2]) + (part[1] + part[3]);
    return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

/* Stores the first n < W or all W floats. */
HIDDEN void NAME(put)(float *y, V x, int n)
{
    float part[W];
    if (n == W)
        STORE(y, x);
    else {
        STORE(part, x);
        memcpy(y, part, n * sizeof(float));
    }
}

/* y = act(gain (x - mean) / root(variance + 1e-5) + shift) row by row; `normal` and `inverse` (0: not kept) take what the
   way back needs. */
static void NAME(layer_norm)(const float *x, long rows, int n, const float *gain, const float *shift, int act, float *y,
                             float *normal, float *inverse)
{
    const float each = 1.0f / (float)n;
    for (long r = 0; r < rows; r++, x += n, y += n) {
        V sum[LANES / W], square[LANES / W];
        for (int c = 0; c < LANES / W; c++)
            sum[c] = square[c] = ALL(0.0f);
        EACH_VECTOR(sum[c] = ADD(sum[c], NAME(some)(x + i, here));)
        const V mean = ALL(NAME(total)(sum) * each);
        EACH_VECTOR(V off = SUB(NAME(some)(x + i, here), mean); float part[W]; if (here < W) {
            STORE(part, off);
            off = NAME(some)(part, here);
        } square[c] = FMA(off, off, square[c]);)
        const float scale = 1.0f / __builtin_sqrtf(NAME(total)(square) * each + 1e-5f);
        EACH_VECTOR(V z = MUL(SUB(NAME(some)(x + i, here), mean), ALL(scale));
                    V out = FMA(z, NAME(some)(gain + i, here), NAME(some)(shift + i, here));
                    if (normal) NAME(put)(normal + r * n + i, z, here);
                    NAME(put)(y + i, NAME(activated)(out, act), here);)
        if (inverse)
            inverse[r] = scale;
    }
}

/* for_x [rows, n], which may be `gradient`, by the gradient of y = `out`. */
static void NAME(layer_norm_back)(const float *gradient, const float *out, long rows, int n, const float *gain, int act,
                                  const float *normal, const float *inverse, float *for_x, float *for_gain,
                                  float *for_shift)
{
    for (int i = 0; i < n && for_gain; i++)
        for_gain[i] = for_shift[i] = 0.0f;
    const float each = 1.0f / (float)n;
    for (long r = 0; r < rows; r++, gradient += n, normal += n, for_x += n) {
        V sum[LANES / W], product[LANES / W];
        for (int c = 0; c < LANES / W; c++)
            sum[c] = product[c] = ALL(0.0f);
        /* The gradient of the normalised numbers z, and its sums, alone and times z. */
        EACH_VECTOR(V own = NAME(some)(gradient + i, here); V z = NAME(some)(normal + i, here);
                    if (out) own = NAME(before)(own, NAME(some)(out + r * n + i, here), act);
                    if (for_gain) {
                        NAME(put)(for_gain + i, FMA(own, z, NAME(some)(for_gain + i, here)), here);
                        NAME(put)(for_shift + i, ADD(own, NAME(some)(for_shift + i, here)), here);
                    } own = MUL(own, NAME(some)(gain + i, here));
                    NAME(put)(for_x + i, own, here); sum[c] = ADD(sum[c], own);
                    product[c] = FMA(own, z, product[c]);)
        const V mean = ALL(NAME(total)(sum) * each), slope = ALL(NAME(total)(product) * each);
        EACH_VECTOR(V off = SUB(SUB(NAME(some)(for_x + i, here), mean), MUL(slope, NAME(some)(normal + i, here)));
                    NAME(put)(for_x + i, MUL(ALL(inverse[r]), off), here);)
    }
}
#undef EACH_VECTOR
#undef LANES

static void NAME(forward)(const float *x, long rows, int layers, const int *width, const float *const *weight,
                          const float *const *bias, int activation, int activated, int turned,
                          const float *const *norm, float *const *kept, float *const *out)
{
    for (int l = 0; l < layers; l++) {
        int k = width[l], n = width[l + 1], normed = norm && l < activated, act = l < activated && !normed ? activation : NONE;
        const float *input = l ? out[l - 1] : x;
        if (turned && rows <= 2 * W)
            NAME(few)(rows, n, k, input, weight[l], out[l], bias[l], act);
        else
            NAME(product)(0, turned, rows, n, k, input, k, weight[l], turned ? k : n, out[l], bias[l], act, 0);
        if (normed)
            NAME(layer_norm)(out[l], rows, n, norm[2 * l], norm[2 * l + 1], activation, out[l], kept ? kept[2 * l] : 0,
                             kept ? kept[2 * l + 1] : 0);
    }
}

static void NAME(backward)(const float *x, long rows, int layers, const int *width, const float *const *weight,
                           int activation, int activated, int turned, const float *const *norm, float *const *kept,
                           float *const *out, const float *gradient, float *const *for_weight, float *const *for_bias,
                           float *const *for_norm, float *for_x, float *spare0, float *spare1)
{
#define BACK(l, from, into)                                                                                            \
    NAME(layer_norm_back)(from, out[l], rows, width[l + 1], norm[2 * (l)], activation, kept[2 * (l)],                  \
                          kept[2 * (l) + 1], into, for_norm ? for_norm[2 * (l)] : 0,                                   \
                          for_norm ? for_norm[2 * (l) + 1] : 0)
    if (activated == layers && norm) {
        BACK(layers - 1, gradient, spare0);
        gradient = spare0;
        spare0 = spare1;
        spare1 = (float *)gradient;
    } else if (activated == layers && activation != NONE) { /* the last output has the activation, too */
        long size = rows * width[layers];
        const float *y = out[layers - 1];
        for (long i = 0; i < size; i++)
            spare0[i] = activation == RELU  ? (y[i] <= 0.0f ? 0.0f : gradient[i])
                        : activation == ELU ? gradient[i] * ((y[i] > 0.0f ? 0.0f : y[i]) + 1.0f)
                                            : gradient[i] * (1.0f - y[i] * y[i]);
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
                          l && l - 1 < activated && !norm ? activation : NONE, l && !norm ? input : 0);
            if (norm && l && l - 1 < activated)
                BACK(l - 1, before, before);
            gradient = before;
            spare0 = spare1;
            spare1 = before;
        }
    }
#undef BACK
}

/* Functions of one number, by fused multiply-adds in a fixed order. Where a branch would be, both are computed. */

HIDDEN float NAME(from_bits)(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

HIDDEN uint32_t NAME(bits_of)(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* e^x = 2^k e^r with r within half of log 2; polynomial of S. Moshier's Cephes (expf). */
HIDDEN float NAME(exp_of)(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float cut = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
    float shifted = __builtin_fmaf(cut, 1.44269504088896341f, shift), k = shifted - shift;
    float r = __builtin_fmaf(k, -0.693359375f, cut);
    r = __builtin_fmaf(k, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    int32_t whole = (int32_t)(NAME(bits_of)(shifted) - NAME(bits_of)(shift)), first = whole >> 1;
    float low = NAME(from_bits)((uint32_t)(first + 127) << 23);
    float high = NAME(from_bits)((uint32_t)(whole - first + 127) << 23);
    return p * low * high; /* in two steps, for results beside 0 and beside infinity */
}

/* log x = e log 2 + log m with m within a root of 2; polynomial of Cephes (logf). */
HIDDEN float NAME(log_of)(float x)
{
    int small = x < 1.17549435e-38f;
    uint32_t bits = NAME(bits_of)(small ? x * 16777216.0f : x);
    uint32_t above = bits - 0x3f3504f3; /* of the root of 1/2 */
    float e = (float)((int32_t)above >> 23) - (small ? 24.0f : 0.0f);
    float m = NAME(from_bits)((above & 0x7fffff) + 0x3f3504f3) - 1.0f, square = m * m;
    float p = 7.0376836292e-2f;
    p = __builtin_fmaf(p, m, -1.1514610310e-1f);
    p = __builtin_fmaf(p, m, 1.1676998740e-1f);
    p = __builtin_fmaf(p, m, -1.2420140846e-1f);
    p = __builtin_fmaf(p, m, 1.4249322787e-1f);
    p = __builtin_fmaf(p, m, -1.6668057665e-1f);
    p = __builtin_fmaf(p, m, 2.0000714765e-1f);
    p = __builtin_fmaf(p, m, -2.4999993993e-1f);
    p = __builtin_fmaf(p, m, 3.3333331174e-1f);
    p = p * m * square;
    p = __builtin_fmaf(e, -2.12194440e-4f, p);
    p = __builtin_fmaf(-0.5f, square, p);
    float y = __builtin_fmaf(e, 0.693359375f, m + p);
    y = x == INFINITY ? INFINITY : y;
    return x > 0.0f ? y : x == 0.0f ? -INFINITY : NAN;
}

/* log(1 + x) by log(u) x / (u - 1) with u = 1 + x rounded (W. Kahan). */
HIDDEN float NAME(log1p_of)(float x)
{
    float u = 1.0f + x, y = NAME(log_of)(u) * (x / (u - 1.0f));
    y = u == 1.0f ? x : y;
    return u == INFINITY ? INFINITY : u == 0.0f ? -INFINITY : y;
}

HIDDEN float NAME(sigmoid_of)(float x)
{
    return 1.0f / (1.0f + NAME(exp_of)(-x));
}

HIDDEN float NAME(elu_alone)(float x)
{
    return (x > 0.0f ? x : 0.0f) + (NAME(exp_of)(x > 0.0f ? 0.0f : x) - 1.0f);
}

HIDDEN void NAME(tanh_all)(const float *x, long size, float *y)
{
    for (long i = 0; i < size; i += W) {
        int here = size - i < W ? (int)(size - i) : W;
        float part[W];
        STORE(part, NAME(tanh_of)(NAME(some)(x + i, here)));
        memcpy(y + i, part, here * sizeof(float));
    }
}

/* The standard normal at whose left x of all lies: the root of 2 times erfinv(2 x - 1) by M. Giles ("Approximating the
   erfinv function", 2010, single precision). */
HIDDEN float NAME(normal_of)(float x)
{
    float y = __builtin_fmaf(2.0f, x, -1.0f), w = -NAME(log_of)((1.0f - y) * (1.0f + y)), a = w - 2.5f;
    float b = __builtin_sqrtf(w > 5.0f ? w : 5.0f) - 3.0f;
    float p = 2.81022636e-08f, q = -0.000200214257f;
    p = __builtin_fmaf(p, a, 3.43273939e-07f);
    q = __builtin_fmaf(q, b, 0.000100950558f);
    p = __builtin_fmaf(p, a, -3.5233877e-06f);
    q = __builtin_fmaf(q, b, 0.00134934322f);
    p = __builtin_fmaf(p, a, -4.39150654e-06f);
    q = __builtin_fmaf(q, b, -0.00367342844f);
    p = __builtin_fmaf(p, a, 0.00021858087f);
    q = __builtin_fmaf(q, b, 0.00573950773f);
    p = __builtin_fmaf(p, a, -0.00125372503f);
    q = __builtin_fmaf(q, b, -0.0076224613f);
    p = __builtin_fmaf(p, a, -0.00417768164f);
    q = __builtin_fmaf(q, b, 0.00943887047f);
    p = __builtin_fmaf(p, a, 0.246640727f);
    q = __builtin_fmaf(q, b, 1.00167406f);
    p = __builtin_fmaf(p, a, 1.50140941f);
    q = __builtin_fmaf(q, b, 2.83297682f);
    return 1.41421356f * ((w < 5.0f ? p : q) * y);
}

#define EACH(f)                                                                                                        \
    for (long i = 0; i < size; i++)                                                                                    \
        y[i] = NAME(f)(x[i]);                                                                                          \
    break
static void NAME(apply)(int f, const float *x, long size, float *y)
{
    switch (f) {
    case EXP: EACH(exp_of);
    case LOG: EACH(log_of);
    case LOG1P: EACH(log1p_of);
    case TANH_OF: NAME(tanh_all)(x, size, y); break;
    case SIGMOID: EACH(sigmoid_of);
    case ELU_OF: EACH(elu_alone);
    default: EACH(normal_of);
    }
}
#undef EACH

static void NAME(squares)(int count, const float *const *x, const long *size, double *sum)
{
    for (int c = 0; c < count; c++) { /* eight sums, which any width of vectors can hold */
        const float *own = x[c];
        double part[8] = {0};
        long i = 0;
        for (; i + 8 <= size[c]; i += 8)
            for (int k = 0; k < 8; k++)
                part[k] = __builtin_fma(own[i + k], own[i + k], part[k]);
        for (; i < size[c]; i++)
            part[i % 8] = __builtin_fma(own[i], own[i], part[i % 8]);
        sum[c] = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
}

HIDDEN double NAME(power)(double x, long n)
{
    double y = 1.0;
    for (; n; n >>= 1, x *= x)
        y = n & 1 ? y * x : y;
    return y;
}

static void NAME(adam)(int count, float *const *parameter, const float *const *gradient, float *const *average,
                       float *const *square, const long *size, const float *step, double lr, double beta1, double beta2,
                       double eps, double decay, int decoupled)
{
    const float least = 1.17549435e-38f, kept = (float)beta2, small = (float)eps;
    const float fresh = (float)(1.0 - beta1), fresh_square = (float)(1.0 - beta2);
    const float added = decoupled ? 0.0f : (float)decay, left = decoupled ? (float)(1.0 - lr * decay) : 1.0f;
    for (int c = 0; c < count; c++) {
        const float rate = (float)(lr / (1.0 - NAME(power)(beta1, (long)step[c])));
        const float unit = (float)(1.0 / __builtin_sqrt(1.0 - NAME(power)(beta2, (long)step[c])));
        float *restrict p = parameter[c], *restrict m = average[c], *restrict v = square[c];
        const float *restrict g = gradient[c];
        for (long i = 0; i < size[c]; i++) {
            float own = __builtin_fmaf(added, p[i], g[i]);
            float mean = __builtin_fmaf(fresh, own - m[i], m[i]);
            float mean_square = __builtin_fmaf(fresh_square, own * own, kept * v[i]);
            mean = mean < least && mean > -least ? 0.0f : mean;
            mean_square = mean_square < least ? 0.0f : mean_square;
            m[i] = mean;
            v[i] = mean_square;
            p[i] = p[i] * left - rate * mean / __builtin_fmaf(__builtin_sqrtf(mean_square), unit, small);
        }
    }
}

static void NAME(rmsprop)(int count, float *const *parameter, const float *const *gradient, float *const *square,
                          const long *size, double lr, double alpha, double eps, double decay)
{
    const float kept = (float)alpha, fresh = (float)(1.0 - alpha), small = (float)eps, added = (float)decay;
    for (int c = 0; c < count; c++) {
        float *restrict p = parameter[c], *restrict v = square[c];
        const float *restrict g = gradient[c];
        for (long i = 0; i < size[c]; i++) {
            float own = __builtin_fmaf(added, p[i], g[i]);
            v[i] = __builtin_fmaf(fresh, own * own, kept * v[i]);
            p[i] = __builtin_fmaf(-(float)lr, own / (__builtin_sqrtf(v[i]) + small), p[i]);
        }
    }
}

/* The product of two rows, by eight sums that any width of vectors can hold. */
HIDDEN double NAME(dot)(const double *x, const double *y, long n)
{
    double sum[8] = {0};
    long i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            sum[k] = __builtin_fma(x[i + k], y[i + k], sum[k]);
    for (; i < n; i++)
        sum[i % 8] = __builtin_fma(x[i], y[i], sum[i % 8]);
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

static void NAME(orthonormal)(double *x, long rows, long n)
{
    for (long r = 0; r < rows; r++) {
        double *own = x + r * n;
        for (long j = 0; j < 2 * r; j++) {
            const double *other = x + (j % r) * n, part = NAME(dot)(own, other, n);
            for (long i = 0; i < n; i++)
                own[i] = __builtin_fma(-part, other[i], own[i]);
        }
        double length = __builtin_sqrt(NAME(dot)(own, own, n));
        for (long i = 0; i < n; i++)
            own[i] /= length;
    }
}

/* Of n numbers, NaN if there is one. */
HIDDEN float NAME(largest)(const float *x, int n)
{
    float most = x[0];
    for (int i = 1; i < n; i++)
        most = x[i] > most || x[i] != x[i] ? x[i] : most;
    return most;
}

static void NAME(log_softmax)(const float *x, long rows, int n, float *y)
{
    float *e = memory(PACKED, n);
    for (long r = 0; r < rows; r++, x += n, y += n) {
        float most = NAME(largest)(x, n), total = 0.0f;
        for (int i = 0; i < n; i++)
            y[i] = x[i] - most;
        for (int i = 0; i < n; i++)
            e[i] = NAME(exp_of)(y[i]);
        for (int i = 0; i < n; i++)
            total += e[i];
        total = NAME(log_of)(total);
        for (int i = 0; i < n; i++)
            y[i] -= total;
    }
}

static void NAME(categorical)(const float *logits, long rows, int n, const uint8_t *mask, const float *uniform,
                              int64_t start, int64_t *action, float *logp)
{
    long size = rows * n;
    float *above = memory(PACKED, 3 * size), *e = above + size, *legal = e + size;
    if (mask) {
        for (long i = 0; i < size; i++)
            legal[i] = mask[i] ? logits[i] : -1e30f;
        logits = legal;
    }
    for (long r = 0; r < rows; r++) {
        float most = NAME(largest)(logits + r * n, n);
        for (int i = 0; i < n; i++)
            above[r * n + i] = logits[r * n + i] - most;
    }
    for (long i = 0; i < size; i++)
        e[i] = NAME(exp_of)(above[i]);
    for (long r = 0; r < rows; r++) {
        const float *own = e + r * n;
        float total = 0.0f, sum = 0.0f;
        for (int i = 0; i < n; i++)
            total += own[i];
        int chosen = 0;
        if (uniform) { /* so that the sum passes it at a choice of more than 0, whatever is rounded */
            float at = uniform[r] * (total * (1.0f - 0x1p-21f));
            for (; chosen < n - 1; chosen++) {
                sum += own[chosen];
                if (sum > at)
                    break;
            }
        } else
            while (chosen < n - 1 && above[r * n + chosen] < 0.0f)
                chosen++;
        action[r] = chosen + start;
        logp[r] = above[r * n + chosen] - NAME(log_of)(total);
    }
}

#define LOG_SQRT_2PI 0.918938533f
#define EDGE 0.999999f /* squashed actions stay inside, as in penstock/agents/distributions.py */
static void NAME(gaussian)(const float *mean, long rows, int n, const float *log_std, const float *center,
                           const float *half, const float *uniform, int squash, float *action, float *logp)
{
    long size = rows * n;
    float *std = memory(PACKED, 4 * (long)n + 2 * size), *inverse = std + n, *constant = inverse + n, *z = constant + 2 * n;
    float *each = z + size;
    for (int i = 0; i < n; i++) {
        std[i] = NAME(exp_of)(log_std[i]);
        inverse[i] = NAME(exp_of)(-log_std[i]);
        constant[i] = log_std[i] + (NAME(log_of)(half[i]) + LOG_SQRT_2PI);
    }
    for (long i = 0; i < size; i++)
        z[i] = uniform ? NAME(normal_of)(uniform[i]) : 0.0f;
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < n; i++)
            z[r * n + i] = __builtin_fmaf(std[i], z[r * n + i], mean[r * n + i]);
    if (squash) {
        NAME(tanh_all)(z, size, z);
        for (long i = 0; i < size; i++)
            z[i] = z[i] > EDGE ? EDGE : z[i] < -EDGE ? -EDGE : z[i];
    }
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) /* the density is that of the action as it is stored */
            action[r * n + i] = __builtin_fmaf(half[i], z[r * n + i], center[i]);
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < n; i++)
            z[r * n + i] = (action[r * n + i] - center[i]) / half[i];
    if (squash)
        for (long i = 0; i < size; i++) {
            float y = z[i] > EDGE ? EDGE : z[i] < -EDGE ? -EDGE : z[i];
            float x = 0.5f * (NAME(log1p_of)(y) - NAME(log1p_of)(-y)), far = x < 0.0f ? -x : x;
            z[i] = x;
            each[i] = 2.0f * (0.693147181f - far - NAME(log1p_of)(NAME(exp_of)(-2.0f * far)));
        }
    for (long r = 0; r < rows; r++) {
        float sum = 0.0f;
        for (int i = 0; i < n; i++) {
            float off = (z[r * n + i] - mean[r * n + i]) * inverse[i];
            sum += __builtin_fmaf(-0.5f * off, off, -constant[i]) - (squash ? each[r * n + i] : 0.0f);
        }
        logp[r] = sum;
    }
}

static void NAME(control)(const float *out, long rows, int n, int gaussian, float spread, const float *uniform,
                          const float *center, const float *half, float *action)
{
    long size = rows * n, step = gaussian ? 2 * n : n;
    float *z = memory(PACKED, 3 * size), *mean = z + size, *std = mean + size;
    for (long i = 0; i < size; i++)
        z[i] = uniform ? NAME(normal_of)(uniform[i]) : 0.0f;
    for (long r = 0; r < rows; r++)
        memcpy(mean + r * n, out + r * step, n * sizeof(float));
    if (gaussian) {
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < n; i++) {
                float x = out[r * step + n + i];
                std[r * n + i] = x > 2.0f ? 2.0f : x < -20.0f ? -20.0f : x;
            }
        for (long i = 0; i < size; i++)
            mean[i] = __builtin_fmaf(NAME(exp_of)(std[i]), z[i], mean[i]);
    }
    NAME(tanh_all)(mean, size, mean);
    for (long i = 0; i < size && !gaussian; i++) {
        float x = __builtin_fmaf(spread, z[i], mean[i]);
        mean[i] = x > 1.0f ? 1.0f : x < -1.0f ? -1.0f : x;
    }
    for (long r = 0; r < rows; r++)
        for (int i = 0; i < n; i++)
            action[r * n + i] = __builtin_fmaf(half[i], mean[r * n + i], center[i]);
}

#undef ISA
#undef V
#undef W
#undef N
#undef ROWS
#undef NARROW
#undef VECTORS
#undef TILE
#undef TILE_NAME
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
