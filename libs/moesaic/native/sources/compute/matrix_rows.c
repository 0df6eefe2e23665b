// Around products: weights out of panels, rows of floats into bytes.
#include "compute/matrix.h"
#include "compute/pool.h"

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
