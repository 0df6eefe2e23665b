#include "compute/matrix.h"
#include "compute/pool.h"

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

// The same with unsigned weights up to 24, for a few steps: the sums are `folded` before the next block.
INLINE ivec add_small4(ivec sums, ivec weights, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVX512F__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
    return (ivec)_mm512_add_epi16((__m512i)sums, pairs);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
    return (ivec)_mm256_add_epi16((__m256i)sums, pairs);
#else
    return add_dot4(sums, x, (struct fours){.weights = weights});
#endif
}
INLINE ivec folded(ivec sums) {
#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
    return (ivec)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (ivec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
    return sums;
#endif
}

// The levels of codes, a byte each.
INLINE ivec levels_of(const uint8_t *levels, ivec codes) {
#if defined(__AVX512F__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
    return (ivec)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels));
    return (ivec)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
    uint8_t bytes[LANES * 4];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < LANES * 4; i++) bytes[i] = levels[bytes[i]];
    memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}

// Input `p` of a panel of numbers.
INLINE void load_weights(const int form, const void *panel, int64_t p, vec weights[TILE_VECTORS]) {
    const float *floats = (const float *)panel + p * PANEL;
    const uint16_t *numbers = (const uint16_t *)panel + p * PANEL;
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
        if (form == FLOAT32)
            weights[v] = load(floats + v * LANES);
        else if (form == FLOAT16)
            weights[v] = widened_float16(load_halves(numbers + v * LANES));
        else if (v % 2 == 0) {
            const ivec words = (ivec)load((const float *)(numbers + v * LANES));
            weights[v] = (vec)(words << 16);
            weights[v + 1] = (vec)(words & (int32_t)0xffff0000);
        }
    }
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

INLINE void tile_float(const int form, const int count, const float *x, int64_t stride,
                       const void *panel, int64_t in, const float *bias, float *out,
                       int64_t out_stride, int64_t columns, int onto) {
    vec sums[TILE_ROWS][TILE_VECTORS] = {0};
    if (onto)
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[i][v] = load(out + i * out_stride + v * LANES);
    for (int64_t p = 0; p < in; p++) {
        vec weights[TILE_VECTORS];
        load_weights(form, panel, p, weights);
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

INLINE void tile_fp8(const int count, const float *x, int64_t stride, const struct matrix *m,
                     int64_t panel, const float *bias, float *out, int64_t out_stride,
                     int64_t columns) {
    const uint8_t *codes = (const uint8_t *)m->panels + panel * PANEL * m->num_in;
    const float *scales = (const float *)m->group_scales + panel * PANEL * num_groups(m);
    vec totals[TILE_ROWS][TILE_VECTORS] = {0};
    for (int64_t begin = 0; begin < m->num_in; begin += m->group, scales += PANEL) {
        const int64_t end = begin + m->group < m->num_in ? begin + m->group : m->num_in;
        vec sums[TILE_ROWS][TILE_VECTORS] = {0};
        for (int64_t p = begin; p < end; p++, codes += PANEL) {
            vec weights[TILE_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                weights[v] = widened_fp8(load_quarters(codes + v * LANES));
#pragma GCC unroll 8
            for (int i = 0; i < count; i++) {
                const vec factor = all(x[i * stride + p]);
#pragma GCC unroll 4
                for (int v = 0; v < TILE_VECTORS; v++)
                    sums[i][v] = fma_of(factor, weights[v], sums[i][v]);
            }
        }
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++)
                totals[i][v] = fma_of(sums[i][v], load(scales + v * LANES) * 256.0f, totals[i][v]);
    }
    if (bias)
        for (int i = 0; i < count; i++)
            for (int v = 0; v < TILE_VECTORS; v++) totals[i][v] += load(bias + v * LANES);
    write_tile(totals, count, out, out_stride, columns);
}

// Where it pays: without such instructions the compiler would drown in what stands for them.
#if defined(__AVX2__)
#define UNROLL(n) _Pragma(STRING(GCC unroll n))
#define STRING(text) #text
#else
#define UNROLL(n)
#endif

// Bytes of codes, where memory sets the pace: a processor by itself reads ahead to the end of a page at most.
enum { AHEAD = 2048 };

// One block of inputs: sums of 16 bits have room for 8 steps of codes, and for 4 of levels.
INLINE void add_block(const int levelled, const int count, const uint8_t *x, int64_t stride,
                      const uint8_t *codes, const uint8_t *levels,
                      ivec sums[TILE_ROWS][TILE_VECTORS]) {
    enum { STEPS = GROUP_BLOCK / 8 };
    ivec pairs[TILE_ROWS][TILE_VECTORS] = {0};
    UNROLL(2)
    for (int high = 0; high < 2; high++) {
        UNROLL(4)
        for (int step = 0; step < STEPS; step++) {
            ivec weights[TILE_VECTORS];
            if (count < TILE_ROWS && !high) __builtin_prefetch(codes + step * PANEL * 4 + AHEAD);
            UNROLL(4)
            for (int v = 0; v < TILE_VECTORS; v++) {
                const uint8_t *from = codes + (step * PANEL + v * LANES) * 4;
                const ivec both = (ivec)load((const float *)from);
                weights[v] = (high ? both >> 4 : both) & 0x0f0f0f0f;
                if (levelled) weights[v] = levels_of(levels, weights[v]);
            }
            UNROLL(8)
            for (int i = 0; i < count; i++) {
                int32_t four;
                memcpy(&four, x + i * stride + (high * STEPS + step) * 4, 4);
                const ivec factor = four - (ivec){0};
                UNROLL(4)
                for (int v = 0; v < TILE_VECTORS; v++)
                    pairs[i][v] = add_small4(pairs[i][v], weights[v], factor);
            }
        }
        if (!levelled && !high) continue;
        UNROLL(8)
        for (int i = 0; i < count; i++)
            UNROLL(4)
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[i][v] += folded(pairs[i][v]), pairs[i][v] = (ivec){0};
    }
}

INLINE void tile_int4(const int levelled, const int count, const uint8_t *x, int64_t stride,
                      const float *x_scales, int64_t scale_stride, const struct matrix *m,
                      int64_t panel, const float *bias, float *out, int64_t out_stride,
                      int64_t columns) {
    const int64_t groups = num_groups(m), blocks = in_blocks(m->num_in);
    const int64_t each = in_blocks(m->group < m->num_in ? m->group : m->num_in);
    const uint8_t *codes = (const uint8_t *)m->panels + panel * PANEL * blocks * (GROUP_BLOCK / 2);
    const uint16_t *scales = (const uint16_t *)m->group_scales + panel * PANEL * groups;
    const uint16_t *zeros = m->zeros ? m->zeros + panel * PANEL * groups : 0;
    vec totals[TILE_ROWS][TILE_VECTORS] = {0};
    for (int64_t g = 0, block = 0; g < groups; g++, scales += PANEL) {
        ivec sums[TILE_ROWS][TILE_VECTORS] = {0};
        for (const int64_t end = block + each; block < end && block < blocks; block++) {
            add_block(levelled, count, x + block * GROUP_BLOCK, stride, codes, m->levels, sums);
            codes += PANEL * GROUP_BLOCK / 2;
        }
        vec factors[TILE_VECTORS], none[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++) {
            factors[v] = widened_float16(load_halves(scales + v * LANES));
            none[v] = zeros ? widened_float16(load_halves(zeros + g * PANEL + v * LANES))
                            : all((float)m->zero);
        }
        for (int i = 0; i < count; i++) {
            const float *own = x_scales + i * scale_stride;
            const vec scale = all(own[g]), sum = all(-own[groups + g]);
            for (int v = 0; v < TILE_VECTORS; v++) {
                const vec exact = fma_of(none[v], sum, __builtin_convertvector(sums[i][v], vec));
                totals[i][v] = fma_of(exact, factors[v] * scale, totals[i][v]);
            }
        }
    }
    for (int i = 0; i < count; i++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            totals[i][v] *= load(m->scales + panel * PANEL + v * LANES);
            if (bias) totals[i][v] += load(bias + v * LANES);
        }
    write_tile(totals, count, out, out_stride, columns);
}

// One call for each number of rows, which so is a constant.
#define EACH_COUNT(call)           \
    switch (left) {                \
        case 1: call(1); break;    \
        case 2: call(2); break;    \
        case 3: call(3); break;    \
        case 4: call(4); break;    \
        case 5: call(5); break;    \
        case 6: call(6); break;    \
    }

void multiply_panel(const struct matrix *m, struct rows x, int64_t first, int64_t count,
                    int64_t panel, float *out, int64_t out_stride, int64_t columns, int onto) {
    const int64_t column = panel * PANEL, in = m->num_in;
    const float *bias = m->bias ? m->bias + column : 0;
    const void *wide = (const float *)m->panels + column * in;
    const void *narrow = (const uint16_t *)m->panels + column * in;
    const int8_t *bytes = (const int8_t *)m->panels + column * 4 * in_fours(in);
    for (int64_t done = 0; done < count; done += TILE_ROWS, out += TILE_ROWS * out_stride) {
        const int64_t row = first + done;
        const int64_t left = count - done < TILE_ROWS ? count - done : TILE_ROWS;
        const float *floats = (const float *)x.data + row * x.stride;
        const uint8_t *rounded = (const uint8_t *)x.data + row * x.stride;
        const float *scales = x.scales + row * x.scale_stride;
#define TILE32(n) \
    tile_float(FLOAT32, n, floats, x.stride, wide, in, bias, out, out_stride, columns, onto)
#define TILE_B16(n) \
    tile_float(BFLOAT16, n, floats, x.stride, narrow, in, bias, out, out_stride, columns, 0)
#define TILE_F16(n) \
    tile_float(FLOAT16, n, floats, x.stride, narrow, in, bias, out, out_stride, columns, 0)
#define TILE_8(n)                                                                          \
    tile_int8(n, rounded, x.stride, scales, bytes, in_fours(in), m->scales + column,       \
              m->offsets + column, bias, out, out_stride, columns)
#define TILE_4(n)                                                                          \
    tile_int4(0, n, rounded, x.stride, scales, x.scale_stride, m, panel, bias, out,        \
              out_stride, columns)
#define TILE_LEVELS(n)                                                                     \
    tile_int4(1, n, rounded, x.stride, scales, x.scale_stride, m, panel, bias, out,        \
              out_stride, columns)
#define TILE_FP8(n) tile_fp8(n, floats, x.stride, m, panel, bias, out, out_stride, columns)
        switch (m->form) {
            case FLOAT32: EACH_COUNT(TILE32) break;
            case BFLOAT16: EACH_COUNT(TILE_B16) break;
            case FLOAT16: EACH_COUNT(TILE_F16) break;
            case INT8: EACH_COUNT(TILE_8) break;
            case INT4:
                if (m->levels)
                    EACH_COUNT(TILE_LEVELS)
                else
                    EACH_COUNT(TILE_4)
                break;
            case FP8: EACH_COUNT(TILE_FP8) break;
        }
    }
}

EXPORT int64_t panel_width(void) { return PANEL; }
EXPORT int64_t vector_width(void) { return LANES; }

// The largest magnitude, as a scale.
static float scale_of(const float *from, int64_t size) {
    vec most = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec x = load(from + i);
        most = larger(choose(x < 0, -x, x), most);
    }
    const vec rest = load_some(from + i, size - i);
    const float largest = largest_of(larger(choose(rest < 0, -rest, rest), most));
    return (largest > 1e-30f ? largest : 1e-30f) / LEVELS;
}

// Rounds to bytes around a number; returns the sum of what they stand for.
static int32_t round_part(const float *from, int64_t size, float scale, int around, uint8_t *to) {
    const float per_level = 1.0f / scale;
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    int32_t sum = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i < LANES ? size - i : LANES;
        const vec x = left == LANES ? load(from + i) : load_some(from + i, left);
        const vec level = (x * per_level + shift) - shift;
        const ivec whole = __builtin_convertvector(level, ivec);
        for (int64_t j = 0; j < left; j++) {
            to[i + j] = (uint8_t)(whole[j] + around);
            sum += (int8_t)whole[j];
        }
    }
    return sum;
}

void round_row(const struct matrix *m, const float *from, uint8_t *to, float *scales) {
    const int64_t in = m->num_in, bytes = rounded_bytes(m);
    if (m->form == INT8) {
        scales[0] = scale_of(from, in);
        round_part(from, in, scales[0], AROUND, to);
        memset(to + in, AROUND, (size_t)(bytes - in));
        return;
    }
    const int64_t groups = num_groups(m);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * m->group, left = in - begin;
        const int64_t size = left < m->group ? left : m->group;
        scales[g] = scale_of(from + begin, size);
        scales[groups + g] = (float)round_part(from + begin, size, scales[g], 0, to + begin);
    }
    memset(to + in, 0, (size_t)(bytes - in));
}

// Where a panel has input `i` of output `o`: an index of its items; of int4, of its halves of bytes.
INLINE int64_t place_of(const int form, int64_t num_in, int64_t o, int64_t i) {
    const int64_t panel = o / PANEL, own = o % PANEL;
    if (form == INT8)
        return (panel * in_fours(num_in) + i / 4) * PANEL * 4 + own * 4 + i % 4;
    if (form == INT4) {
        const int64_t block = i / GROUP_BLOCK, at = i % GROUP_BLOCK, half = GROUP_BLOCK / 2;
        const int64_t byte = ((panel * in_blocks(num_in) + block) * half + at % half / 4 * 4) * PANEL;
        return 2 * (byte + own * 4 + at % 4) + at / half;
    }
    if (form == BFLOAT16) {  // of two vectors, item by item
        const int64_t pair = own / (2 * LANES), lane = own % LANES, second = own / LANES % 2;
        return (panel * num_in + i) * PANEL + pair * 2 * LANES + 2 * lane + second;
    }
    return (panel * num_in + i) * PANEL + own;
}

static float float16_at(const uint16_t *numbers, int64_t at) {
    const halves all_alike = numbers[at] - (halves){0};
    return widened_float16(all_alike)[0];
}

static float fp8_of(uint8_t code) {
    const quarters all_alike = (int8_t)code - (quarters){0};
    return widened_fp8(all_alike)[0] * 256.0f;
}

INLINE float weight_at(const int form, const struct matrix *m, int64_t o, int64_t i) {
    const int64_t at = place_of(form, m->num_in, o, i);
    if (form == FLOAT32) return ((const float *)m->panels)[at];
    if (form == FLOAT16) return float16_at(m->panels, at);
    if (form == BFLOAT16) {
        const uint32_t bits = (uint32_t)((const uint16_t *)m->panels)[at] << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    if (form == INT8) return (float)((const int8_t *)m->panels)[at] * m->scales[o];
    const int64_t group = (o / PANEL * num_groups(m) + i / m->group) * PANEL + o % PANEL;
    const uint8_t *codes = m->panels;
    if (form == FP8) return fp8_of(codes[at]) * ((const float *)m->group_scales)[group];
    const int code = codes[at / 2] >> at % 2 * 4 & 15;
    const float level = (float)(m->levels ? m->levels[code] : code);
    const float zero = m->zeros ? float16_at(m->zeros, group) : (float)m->zero;
    return (level - zero) * (float16_at(m->group_scales, group) * m->scales[o]);
}

// The weights of one output, as floats.
static void matrix_row(const struct matrix *m, int64_t row, float *out) {
#define EACH_INPUT(form) \
    for (int64_t i = 0; i < m->num_in; i++) out[i] = weight_at(form, m, row, i)
    switch (m->form) {
        case FLOAT32: EACH_INPUT(FLOAT32); break;
        case BFLOAT16: EACH_INPUT(BFLOAT16); break;
        case FLOAT16: EACH_INPUT(FLOAT16); break;
        case INT8: EACH_INPUT(INT8); break;
        case INT4: EACH_INPUT(INT4); break;
        case FP8: EACH_INPUT(FP8); break;
    }
}

struct looking {
    const struct matrix *matrix;
    const int64_t *ids;
    float *out;
};

static void look_up_one(void *with, int64_t row, int worker) {
    const struct looking *l = with;
    (void)worker;
    matrix_row(l->matrix, l->ids[row], l->out + row * l->matrix->num_in);
}

EXPORT void look_up(const struct matrix *matrix, const int64_t *ids, int64_t count, float *out,
                    int threads) {
    struct looking looking = {matrix, ids, out};
    in_parallel(look_up_one, &looking, count, threads);
}
