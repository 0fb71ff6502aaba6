/* What a CPU does in a decode step: linear layers and adapters on few rows, and attention of one query token a sequence
 * over pages. All read much and compute little, so each reads all of it once, where it lies.
 * float32. No fast-math: NaN and infinity stay what they are.
 */

#include <math.h>
#include <string.h>

static inline float dot(const float *p, const float *q, int n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += p[i] * q[i];
    return sum;
}

/* A block of a linear layer: OUTS x ROWS sums, a vector each, and OUTS vectors of weights, all in registers. */
#ifdef __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 4
#if defined(__AVX512VL__) || defined(__aarch64__) /* 32 registers instead of 16 */
#define OUTS 6
#else
#define OUTS 3
#endif

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

/* n <= LANES values and zeros. */
static inline __attribute__((always_inline)) lanes load(const float *p, int n) {
    lanes v = {0};
    memcpy(&v, p, n * sizeof *p);
    return v;
}

static inline float sum_of(lanes v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            part[i] += part[i + half];
    return part[0];
}

/* Add n <= LANES products to the sums. */
static inline __attribute__((always_inline)) void add_products(lanes sums[OUTS][ROWS], const float *x, const float *w,
                                                               int in, int n, const int outs, const int rows) {
    lanes weights[OUTS];
    for (int o = 0; o < outs; o++) {
        weights[o] = load(w + (long)o * in, n);
        /* Of the outputs that come next, into the second cache: the first one holds x. */
        __builtin_prefetch(w + (long)(o + outs) * in, 0, 2);
    }
    for (int t = 0; t < rows; t++) {
        const lanes inputs = load(x + (long)t * in, n);
        for (int o = 0; o < outs; o++)
            sums[o][t] += weights[o] * inputs;
    }
}

/* y[t][o] = x[t] . w[o] + bias[o] of `outs` outputs and `rows` rows, both constants where it is called. */
static inline __attribute__((always_inline)) void few(const float *x, const float *w, const float *bias, float *y,
                                                      int in, int out, const int outs, const int rows) {
    lanes sums[OUTS][ROWS];
    for (int o = 0; o < outs; o++)
        for (int t = 0; t < rows; t++)
            sums[o][t] = (lanes){0};
    int i = 0;
    for (; i + LANES <= in; i += LANES)
        add_products(sums, x + i, w + i, in, LANES, outs, rows);
    if (i < in)
        add_products(sums, x + i, w + i, in, in - i, outs, rows);
    for (int o = 0; o < outs; o++)
        for (int t = 0; t < rows; t++)
            y[(long)t * out + o] = sum_of(sums[o][t]) + (bias ? bias[o] : 0);
}

/* As `few`, of `outs` outputs, a constant, and up to ROWS rows. */
static inline __attribute__((always_inline)) void some(const float *x, const float *w, const float *bias, float *y,
                                                       int in, int out, const int outs, int rows) {
    switch (rows) {
    case 1:
        return few(x, w, bias, y, in, out, outs, 1);
    case 2:
        return few(x, w, bias, y, in, out, outs, 2);
    case 3:
        return few(x, w, bias, y, in, out, outs, 3);
    default:
        return few(x, w, bias, y, in, out, outs, ROWS);
    }
}

/* y = x W^T + bias (or NULL). x (rows, in), w (out, in), y (rows, out). */
void polylens_linear(const float *x, const float *w, const float *bias, float *y, int rows, int in, int out,
                     int num_threads) {
    const int blocks = out / OUTS, singles = out % OUTS;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int task = 0; task < blocks + singles; task++) {
        const int o = task < blocks ? task * OUTS : out - singles + task - blocks;
        const float *weights = w + (long)o * in, *biases = bias ? bias + o : 0;
        for (int t = 0; t < rows; t += ROWS) {
            if (task < blocks)
                some(x + (long)t * in, weights, biases, y + (long)t * out + o, in, out, OUTS, rows - t);
            else
                some(x + (long)t * in, weights, biases, y + (long)t * out + o, in, out, 1, rows - t);
        }
    }
}

typedef struct {
    const float *a; /* (rank, in) */
    const float *b; /* (out, rank) */
    float scaling;
    int rank, start, stop;
} segment;

/* y[start:stop] += scaling (x[start:stop] A^T) B^T for every segment: lora.ops.apply_factored_ is the definition.
 * x (t, in), y (t, out); h: room for the sum of rows * rank over the segments.
 */
void polylens_factored(const float *x, float *y, int in, int out, const segment *segments, int num_segments, float *h,
                       int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        float *h_tr = h;
        for (int s = 0; s < num_segments; s++) {
            const segment seg = segments[s];
            const int rows = seg.stop - seg.start;
#pragma omp for schedule(static) nowait
            for (int r = 0; r < seg.rank; r++)
                for (int t = 0; t < rows; t++)
                    h_tr[(long)t * seg.rank + r] =
                        seg.scaling * dot(x + (long)(seg.start + t) * in, seg.a + (long)r * in, in);
            h_tr += (long)rows * seg.rank;
        }
#pragma omp barrier
        h_tr = h;
        for (int s = 0; s < num_segments; s++) {
            const segment seg = segments[s];
            const int rows = seg.stop - seg.start;
#pragma omp for schedule(static) nowait
            for (int o = 0; o < out; o++)
                for (int t = 0; t < rows; t++)
                    y[(long)(seg.start + t) * out + o] +=
                        dot(h_tr + (long)t * seg.rank, seg.b + (long)o * seg.rank, seg.rank);
            h_tr += (long)rows * seg.rank;
        }
    }
}

#define BLOCK 64 /* context tokens whose scores are held at a time */

typedef struct {
    const long *slots; /* of the context's tokens, the query's own last */
    int row;           /* of q and out */
    int num_context;
} decoding;

/* One query token a sequence over its context: out = softmax(scale q k^T) v, heads of one group sharing k and v.
 *
 * q, out: row t, head h at q + t * q_row + h * q_head, out + (t * heads + h) * v_width. keys (slots, groups, k_width),
 * values (slots, groups, v_width). Sums run over blocks of the context, rescaled when a larger score turns up.
 */
static void attend(const float *q, long q_head, float *out, const float *keys, const float *values, const long *slots,
                   int num_context, int per_group, int groups, int k_width, int v_width, float scale) {
    float score[per_group][BLOCK], largest[per_group], total[per_group];
    for (int h = 0; h < per_group; h++) {
        largest[h] = -INFINITY;
        total[h] = 0;
        for (int e = 0; e < v_width; e++)
            out[(long)h * v_width + e] = 0;
    }
    for (int first = 0; first < num_context; first += BLOCK) {
        const int n = num_context - first < BLOCK ? num_context - first : BLOCK;
        for (int c = 0; c < n; c++) {
            const float *key = keys + slots[first + c] * groups * k_width;
            for (int h = 0; h < per_group; h++)
                score[h][c] = scale * dot(q + h * q_head, key, k_width);
        }
        for (int h = 0; h < per_group; h++) {
            float now = largest[h], sum = 0;
            for (int c = 0; c < n; c++)
                now = score[h][c] > now || score[h][c] != score[h][c] ? score[h][c] : now;
            const float rescale = expf(largest[h] - now);
            for (int c = 0; c < n; c++)
                sum += score[h][c] = expf(score[h][c] - now);
            largest[h] = now;
            total[h] = total[h] * rescale + sum;
            for (int e = 0; e < v_width; e++)
                out[(long)h * v_width + e] *= rescale;
        }
        for (int c = 0; c < n; c++) {
            const float *value = values + slots[first + c] * groups * v_width;
            for (int h = 0; h < per_group; h++) {
                float *sum = out + (long)h * v_width;
                const float weight = score[h][c];
#pragma omp simd
                for (int e = 0; e < v_width; e++)
                    sum[e] += weight * value[e];
            }
        }
    }
    for (int h = 0; h < per_group; h++)
        for (int e = 0; e < v_width; e++)
            out[(long)h * v_width + e] /= total[h];
}

void polylens_decode_attention(const float *q, long q_row, long q_head, float *out, const float *keys,
                               const float *values, const decoding *sequences, int num_sequences, int heads, int groups,
                               int k_width, int v_width, float scale, int num_threads) {
    const int per_group = heads / groups;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int task = 0; task < num_sequences * groups; task++) {
        const decoding seq = sequences[task / groups];
        const int group = task % groups, head = group * per_group;
        attend(q + seq.row * q_row + head * q_head, q_head, out + ((long)seq.row * heads + head) * v_width,
               keys + (long)group * k_width, values + (long)group * v_width, seq.slots, seq.num_context, per_group,
               groups, k_width, v_width, scale);
    }
}
