#include "compute/matrix.h"

#if defined(__AVX512VNNI__)
enum { AROUND = ZERO };
#else
enum { AROUND = 0 };  // instructions that take unsigned bytes would saturate: rows are signed bytes
#endif

// Four weights of each of LANES outputs, and, of signed rows, their magnitudes.
struct fours {
    ivec weights, magnitudes;
};
INLINE struct fours fours_of(const int8_t *from) {
    struct fours b = {.weights = (ivec)load((const float *)from)};
#if defined(__AVX512F__)
    if (!AROUND) b.magnitudes = (ivec)_mm512_abs_epi8((__m512i)b.weights);
#elif defined(__AVX2__)
    if (!AROUND) b.magnitudes = (ivec)_mm256_abs_epi8((__m256i)b.weights);
#endif
    return b;
}

// sum[i] + a[4i] b[4i] + ... + a[4i + 3] b[4i + 3].
INLINE ivec add_dot4(ivec sum, ivec a, struct fours b) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b.weights);
#elif defined(__AVX512F__)
    // The sum of two products of magnitudes below 128 fits 16 bits.
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)b.weights);
    const __m512i zero = _mm512_setzero_si512();
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)a, negative, zero, (__m512i)a);
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)b.magnitudes, turned);
    return sum + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    // The sum of two products of magnitudes below 128 fits 16 bits.
    const __m256i turned = _mm256_sign_epi8((__m256i)a, (__m256i)b.weights);
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)b.magnitudes, turned);
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int i = 0; i < 4; i++)
        sum += ((a << (24 - 8 * i)) >> 24) * ((b.weights << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

INLINE void write_tile(vec sums[TILE_ROWS][TILE_VECTORS], int count, float *out, int64_t stride,
                       int64_t columns) {
    if (columns == PANEL) {
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++) store(out + i * stride + v * LANES, sums[i][v]);
        return;
    }
    for (int i = 0; i < count; i++) memcpy(out + i * stride, sums[i], (size_t)columns * 4);
}

INLINE void tile_float(const int count, const float *x, int64_t stride, const float *panel,
                       int64_t in, const float *bias, float *out, int64_t out_stride,
                       int64_t columns, int onto) {
    vec sums[TILE_ROWS][TILE_VECTORS] = {0};
    if (onto)
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[i][v] = load(out + i * out_stride + v * LANES);
    for (int64_t p = 0; p < in; p++, panel += PANEL) {
        vec weights[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) weights[v] = load(panel + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const vec factor = all(x[i * stride + p]);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[i][v] = fma_of(factor, weights[v], sums[i][v]);
        }
    }
    if (bias)
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++) sums[i][v] += load(bias + v * LANES);
    write_tile(sums, count, out, out_stride, columns);
}

INLINE void tile_int8(const int count, const uint8_t *x, int64_t stride, const float *x_scales,
                      const int8_t *panel, int64_t fours, const float *scales,
                      const int32_t *offsets, const float *bias, float *out, int64_t out_stride,
                      int64_t columns) {
    ivec sums[TILE_ROWS][TILE_VECTORS] = {0};
    for (int64_t p = 0; p < fours; p++, panel += 4 * PANEL) {
        struct fours weights[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) weights[v] = fours_of(panel + v * LANES * 4);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            int32_t four;
            memcpy(&four, x + i * stride + 4 * p, 4);
            const ivec factor = four - (ivec){0};
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[i][v] = add_dot4(sums[i][v], factor, weights[v]);
        }
    }
    vec results[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < count; i++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            ivec sum = sums[i][v];
            if (AROUND) sum -= (ivec)load((const float *)(offsets + v * LANES));
            results[i][v] =
                __builtin_convertvector(sum, vec) * load(scales + v * LANES) * x_scales[i];
            if (bias) results[i][v] += load(bias + v * LANES);
        }
    write_tile(results, count, out, out_stride, columns);
}

void multiply_panel(const struct matrix *m, struct rows x, int64_t first, int64_t count,
                    int64_t panel, float *out, int64_t out_stride, int64_t columns, int onto) {
    const int64_t column = panel * PANEL;
    const float *bias = m->bias ? m->bias + column : 0;
    for (int64_t done = 0; done < count; done += TILE_ROWS, out += TILE_ROWS * out_stride) {
        const int64_t row = first + done;
        const int64_t left = count - done < TILE_ROWS ? count - done : TILE_ROWS;
        if (!m->scales) {
            const float *data = (const float *)x.data + row * x.stride;
            const float *weights = (const float *)m->panels + column * m->num_in;
#define TILE(n)                                                                              \
    case n:                                                                                  \
        tile_float(n, data, x.stride, weights, m->num_in, bias, out, out_stride, columns, onto); \
        break
            switch (left) {
                TILE(1);
                TILE(2);
                TILE(3);
                TILE(4);
                TILE(5);
                TILE(6);
            }
#undef TILE
        } else {
            const uint8_t *data = (const uint8_t *)x.data + row * x.stride;
            const int8_t *weights = (const int8_t *)m->panels + column * 4 * in_fours(m);
#define TILE(n)                                                                                \
    case n:                                                                                    \
        tile_int8(n, data, x.stride, x.scales + row, weights, in_fours(m), m->scales + column, \
                  m->offsets + column, bias, out, out_stride, columns);                        \
        break
            switch (left) {
                TILE(1);
                TILE(2);
                TILE(3);
                TILE(4);
                TILE(5);
                TILE(6);
            }
#undef TILE
        }
    }
}

float round_row(const float *from, int64_t size, uint8_t *to) {
    vec most = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec x = load(from + i);
        most = larger(choose(x < 0, -x, x), most);
    }
    const vec rest = load_some(from + i, size - i);
    const float largest = largest_of(larger(choose(rest < 0, -rest, rest), most));
    const float scale = (largest > 1e-30f ? largest : 1e-30f) / LEVELS, per_level = 1.0f / scale;
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    for (i = 0; i < size; i += LANES) {
        const int64_t left = size - i < LANES ? size - i : LANES;
        const vec x = left == LANES ? load(from + i) : load_some(from + i, left);
        const vec level = (x * per_level + shift) - shift;
        ivec whole = __builtin_convertvector(level, ivec) + AROUND;
        for (int64_t j = 0; j < left; j++) to[i + j] = (uint8_t)whole[j];
    }
    for (; size % 4; size++) to[size] = AROUND;
    return scale;
}

EXPORT int64_t panel_width(void) { return PANEL; }
EXPORT int64_t vector_width(void) { return LANES; }
