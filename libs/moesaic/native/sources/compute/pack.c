// Weights as files have them -> panels, see matrix.h. A tile of LANES words, outputs of 32 bits or pairs of 16, and as
// many inputs is turned in registers; each number is read once, and written once.
#include "calls.h"
#include "compute/matrix.h"

enum { CHUNK = 4 * LANES };  // inputs that are widened at a time

typedef int8_t bytes __attribute__((vector_size(LANES)));

INLINE int64_t size_of(const int kind) { return kind == FLOAT32 ? 4 : 2; }

// Exact for every number, subnormal ones, infinities and NaN included.
INLINE float float_of(const int kind, uint16_t stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float value;
    if (kind == BFLOAT16) {
        memcpy(&value, &bits, 4);
        return value;
    }
    // Exponents of float16 begin 112 lower.
    const uint32_t magnitude = (uint32_t)(stored & 0x7fff) << 13, special = 0x7c00u << 13;
    memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= (magnitude & special) == special ? 0x7f800000u : 0;
    bits |= (uint32_t)(stored & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void widen_some(const int kind, const void *from, int64_t count, float *to) {
    if (kind == FLOAT32)
        memcpy(to, from, (size_t)count * 4);
    else
        for (int64_t i = 0; i < count; i++) to[i] = float_of(kind, ((const uint16_t *)from)[i]);
}

// A chunk of a row, zeros behind its end, and of one that is none.
INLINE void widen_chunk(const int kind, const void *from, int64_t left, float *to) {
    if (left >= CHUNK) {
        widen_some(kind, from, CHUNK, to);
        return;
    }
    memset(to, 0, CHUNK * 4);
    if (from) widen_some(kind, from, left, to);
}

#define KEPT(i, s) ((i) & (s) ? LANES + (i) - (s) : (i))
#define CAME(i, s) ((i) & (s) ? LANES + (i) : (i) + (s))
#define TURN_BLOCKS(s)                                                                       \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & (s))) {               \
        const vec a = v[i], b = v[i + (s)];                                                  \
        v[i] = __builtin_shuffle(a, b, (ivec){EACH_LANE(KEPT, s)});                          \
        v[i + (s)] = __builtin_shuffle(a, b, (ivec){EACH_LANE(CAME, s)});                    \
    }

// Rows become columns.
INLINE void turn(vec v[LANES]) {
    if (LANES > 8) TURN_BLOCKS(8 % LANES)
    if (LANES > 4) TURN_BLOCKS(4 % LANES)
    TURN_BLOCKS(2)
    TURN_BLOCKS(1)
}

// Stored rows [halves * rows, in]; a panel takes as many of each half.
struct stored {
    const void *data;
    int64_t rows, halves, in;
};

INLINE int64_t stored_panels(struct stored s) {
    const int64_t each = PANEL / s.halves;
    return (s.rows + each - 1) / each;
}

// The row of an output of a panel; -1: there is no such row.
INLINE int64_t row_at(struct stored s, int64_t panel, int64_t column) {
    const int64_t each = PANEL / s.halves, row = panel * each + column % each;
    return row < s.rows ? column / each * s.rows + row : -1;
}

INLINE const char *row_of(const int kind, struct stored s, int64_t panel, int64_t column) {
    const int64_t row = row_at(s, panel, column);
    return row < 0 ? 0 : (const char *)s.data + row * s.in * size_of(kind);
}

// The same of two rows of 16 bits, the first in the low halves of words.
INLINE void pair_chunk(const void *low, const void *high, int64_t left, uint32_t *to) {
    for (int64_t i = 0; i < CHUNK; i++) {
        to[i] = low && i < left ? ((const uint16_t *)low)[i] : 0;
        to[i] |= high && i < left ? (uint32_t)((const uint16_t *)high)[i] << 16 : 0;
    }
}

// A chunk of what lies in one word of a panel from input `first` on.
INLINE void word_chunk(const int kind, const int form, struct stored s, int64_t panel, int64_t word,
                       int64_t first, void *to) {
    const int64_t left = s.in - first, start = first * size_of(kind);
    if (form == FLOAT32) {
        const char *row = row_of(kind, s, panel, word);
        widen_chunk(kind, row ? row + start : 0, row ? left : 0, to);
        return;
    }
    // Of bfloat16, two neighbouring vectors; of float16, two neighbouring outputs.
    const int64_t low = form == BFLOAT16 ? word / LANES * 2 * LANES + word % LANES : 2 * word;
    const char *lower = row_of(kind, s, panel, low);
    const char *upper = row_of(kind, s, panel, low + (form == BFLOAT16 ? LANES : 1));
    pair_chunk(lower ? lower + start : 0, upper ? upper + start : 0, left, to);
}

INLINE void pack_numbers(const int kind, const int form, struct stored s, float *panels) {
    float chunks[LANES][CHUNK] __attribute__((aligned(64)));
    const int64_t width = form == FLOAT32 ? PANEL : PANEL / 2;  // words
    for (int64_t p = 0; p < stored_panels(s); p++, panels += width * s.in)
        for (int64_t first = 0; first < s.in; first += CHUNK)
            for (int64_t word = 0; word < width; word += LANES) {
                const int64_t left = s.in - first;
                for (int c = 0; c < LANES; c++)
                    word_chunk(kind, form, s, p, word + c, first, chunks[c]);
                for (int64_t i = 0; i < CHUNK && i < left; i += LANES) {
                    vec v[LANES];
#pragma GCC unroll 16
                    for (int c = 0; c < LANES; c++) v[c] = load(chunks[c] + i);
                    turn(v);
                    float *to = panels + (first + i) * width + word;
                    for (int k = 0; k < LANES && i + k < left; k++) store(to + k * width, v[k]);
                }
            }
}

INLINE float largest_in(const int kind, const char *row, int64_t in) {
    float chunk[CHUNK];
    vec most = {0};
    for (int64_t first = 0; first < in; first += CHUNK) {
        widen_chunk(kind, row + first * size_of(kind), in - first, chunk);
        for (int i = 0; i < CHUNK; i += LANES) {
            const vec x = load(chunk + i);
            most = larger(most, choose(x < 0, -x, x));
        }
    }
    float found = 0;
    for (int i = 0; i < LANES; i++) found = most[i] > found ? most[i] : found;
    return found;
}

INLINE void pack_bytes(const int kind, struct stored s, int8_t *panels, float *scales,
                       int32_t *offsets) {
    const int64_t fours = (s.in + 3) / 4;
    const ivec rounding = (ivec)all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    for (int64_t p = 0; p < stored_panels(s); p++, panels += PANEL * fours * 4)
        for (int64_t column = 0; column < PANEL; column += LANES) {
            const char *rows[LANES];
            float scale[LANES];
            int32_t sums[LANES] = {0};
            for (int c = 0; c < LANES; c++) {
                rows[c] = row_of(kind, s, p, column + c);
                const float most = rows[c] ? largest_in(kind, rows[c], s.in) : 0;
                scale[c] = (most > 0x1p-126f ? most : 0x1p-126f) / LEVELS;
            }
            for (int64_t first = 0; first < s.in; first += CHUNK) {
                vec v[LANES];
                for (int c = 0; c < LANES; c++) {
                    float chunk[CHUNK];
                    const int64_t left = rows[c] ? s.in - first : 0;
                    widen_chunk(kind, rows[c] ? rows[c] + first * size_of(kind) : 0, left, chunk);
                    ivec sum = {0};
                    for (int i = 0; i < 4; i++) {
                        const vec level = load(chunk + i * LANES) / all(scale[c]);
                        const ivec whole = (ivec)(level + (vec)rounding) - rounding;
                        const bytes rounded = __builtin_convertvector(whole, bytes);
                        memcpy((char *)&v[c] + i * LANES, &rounded, LANES);
                        sum += whole;
                    }
                    for (int i = 0; i < LANES; i++) sums[c] += sum[i];
                }
                turn(v);
                int8_t *to = panels + (first * PANEL + column * 4);
                for (int k = 0; k < LANES && first / 4 + k < fours; k++)
                    store((float *)(to + k * PANEL * 4), v[k]);
            }
            for (int c = 0; c < LANES; c++) {
                scales[p * PANEL + column + c] = scale[c];
                offsets[p * PANEL + column + c] = ZERO * sums[c];
            }
        }
}

EXPORT void pack_stored(const void *weight, int kind, int64_t rows, int64_t halves, int64_t num_in,
                        int form, void *panels) {
    const struct stored s = {weight, rows, halves, num_in};
    if (form == BFLOAT16) pack_numbers(BFLOAT16, BFLOAT16, s, panels);
    if (form == FLOAT16) pack_numbers(FLOAT16, FLOAT16, s, panels);
    if (form != FLOAT32) return;
    if (kind == FLOAT32) pack_numbers(FLOAT32, FLOAT32, s, panels);
    if (kind == BFLOAT16) pack_numbers(BFLOAT16, FLOAT32, s, panels);
    if (kind == FLOAT16) pack_numbers(FLOAT16, FLOAT32, s, panels);
}

EXPORT void pack_stored_int8(const void *weight, int kind, int64_t rows, int64_t halves,
                             int64_t num_in, int8_t *panels, float *scales, int32_t *offsets) {
    const struct stored s = {weight, rows, halves, num_in};
    if (kind == FLOAT32) pack_bytes(FLOAT32, s, panels, scales, offsets);
    if (kind == BFLOAT16) pack_bytes(BFLOAT16, s, panels, scales, offsets);
    if (kind == FLOAT16) pack_bytes(FLOAT16, s, panels, scales, offsets);
}

EXPORT void widen_stored(const void *weights, int kind, int64_t count, float *to) {
    if (kind == FLOAT32) widen_some(FLOAT32, weights, count, to);
    if (kind == BFLOAT16) widen_some(BFLOAT16, weights, count, to);
    if (kind == FLOAT16) widen_some(FLOAT16, weights, count, to);
}

EXPORT int64_t count_not_finite(const void *weights, int kind, int64_t count) {
    int64_t found = 0;
    if (kind == FLOAT32) {
        const uint32_t *bits = weights;
        for (int64_t i = 0; i < count; i++) found += (bits[i] & 0x7f800000u) == 0x7f800000u;
    } else {
        const uint16_t *bits = weights, special = kind == BFLOAT16 ? 0x7f80 : 0x7c00;
        for (int64_t i = 0; i < count; i++) found += (bits[i] & special) == special;
    }
    return found;
}

// Of a BLOCK of inputs, a word has four codes of the first half in the low halves of its bytes, and four of the second.
INLINE void pack_int4(struct stored s, uint32_t *panels) {
    enum { WORDS = GROUP_BLOCK / 8 };
    const int64_t words = in_blocks(s.in) * WORDS;
    for (int64_t p = 0; p < stored_panels(s); p++, panels += words * PANEL)
        for (int64_t c = 0; c < PANEL; c++) {
            const int64_t row = row_at(s, p, c);
            for (int64_t b = 0; b < words / WORDS; b++) {
                const int64_t left = row < 0 ? 0 : s.in - b * GROUP_BLOCK;
                uint8_t block[GROUP_BLOCK] = {0};
                if (left >= GROUP_BLOCK)
                    memcpy(block, (const uint8_t *)s.data + row * s.in + b * GROUP_BLOCK, GROUP_BLOCK);
                else if (left > 0)
                    memcpy(block, (const uint8_t *)s.data + row * s.in + b * GROUP_BLOCK, (size_t)left);
                for (int q = 0; q < WORDS; q++) {
                    uint32_t low, high;
                    memcpy(&low, block + 4 * q, 4);
                    memcpy(&high, block + GROUP_BLOCK / 2 + 4 * q, 4);
                    panels[(b * WORDS + q) * PANEL + c] = low | high << 4;
                }
            }
        }
}

INLINE void pack_fp8(struct stored s, uint8_t *panels) {
    enum { NEAR = 64 };  // inputs of a panel that stay in the nearest cache
    for (int64_t p = 0; p < stored_panels(s); p++, panels += s.in * PANEL)
        for (int64_t begin = 0; begin < s.in; begin += NEAR)
            for (int64_t c = 0; c < PANEL; c++) {
                const int64_t row = row_at(s, p, c);
                for (int64_t i = begin; i < begin + NEAR && i < s.in; i++)
                    panels[i * PANEL + c] = row < 0 ? 0 : ((const uint8_t *)s.data)[row * s.in + i];
            }
}

EXPORT void pack_codes(const uint8_t *codes, int64_t rows, int64_t halves, int64_t num_in, int form,
                       void *panels) {
    const struct stored s = {codes, rows, halves, num_in};
    if (form == INT4) pack_int4(s, panels);
    if (form == FP8) pack_fp8(s, panels);
}

EXPORT void unpack_codes(const uint8_t *packed, int64_t count, uint8_t *codes) {
    for (int64_t i = 0; i < count; i++) {
        codes[2 * i] = packed[i] & 15;
        codes[2 * i + 1] = packed[i] >> 4;
    }
}

// Rounded half to even; of a magnitude that float16 can have.
INLINE uint16_t float16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size < 0x38800000u) {  // subnormal there: whole multiples of 2^-24
        memcpy(&value, &size, 4);
        return (uint16_t)(sign | (uint32_t)(int32_t)(value * 0x1p24f + 12582912.0f - 12582912.0f));
    }
    return (uint16_t)(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000u) >> 13);
}

// 2^whole, of normal numbers.
INLINE float power_of_two(int32_t whole) {
    const uint32_t bits = (uint32_t)(whole + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// The power of two that brings the largest of a row to 2^13 up to 2^14, within those that are normal both ways.
INLINE int32_t exponent_of(const float *row, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (!most) return 0;
    const int32_t found = (int32_t)(most >> 23) - 126 - 14;
    return found < -126 ? -126 : found;
}

EXPORT void pack_group_scales(const float *scales, int64_t rows, int64_t halves, int64_t groups,
                              uint16_t *panels, float *outputs) {
    const struct stored s = {scales, rows, halves, groups};
    for (int64_t p = 0; p < stored_panels(s); p++, panels += groups * PANEL, outputs += PANEL)
        for (int64_t c = 0; c < PANEL; c++) {
            const float *row = (const float *)row_of(FLOAT32, s, p, c);
            const int32_t exponent = row ? exponent_of(row, groups) : 0;
            // In two steps, for a whole one may have no normal number.
            const float first = power_of_two(-exponent / 2), rest = power_of_two(-exponent + exponent / 2);
            outputs[c] = row ? power_of_two(exponent) : 0;
            for (int64_t g = 0; g < groups; g++)
                panels[g * PANEL + c] = row ? float16_of(row[g] * first * rest) : 0;
        }
}

INLINE float sum_over(vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

// Whole levels -8 to 7 of a group at a scale; returns the squared error.
INLINE float levels_at(const float *group, int64_t size, float scale, float *levels) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    vec error = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec x = load(group + i), most = all(7.0f), least = all(-8.0f);
        vec level = x / all(scale);
        level = choose(level > most, most, choose(level < least, least, level));
        level = (level + shift) - shift;
        store(levels + i, level);
        const vec off = level * all(scale) - x;
        error += off * off;
    }
    return sum_over(error);
}

// Returns the scale.
INLINE float round_group(const float *group, int64_t size, const float *steps, int64_t num_steps,
                         float *levels, float *tried) {
    float extreme = 0, largest = 0, best = 0;
    vec squares = {0};
    for (int64_t i = 0; i < size; i++) {
        const float magnitude = group[i] < 0 ? -group[i] : group[i];
        extreme = magnitude > largest ? group[i] : extreme;
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int64_t i = 0; i < size; i += LANES) squares += load(group + i) * load(group + i);
    float least = sum_over(squares);
    memset(levels, 0, (size_t)size * 4);
    for (int64_t s = 0; s < num_steps; s++) {
        const float scale = extreme / steps[s];
        if (scale == 0) continue;
        const float error = levels_at(group, size, scale, tried);
        if (!(error < least)) continue;
        least = error, best = scale;
        memcpy(levels, tried, (size_t)size * 4);
    }
    return best;
}

EXPORT void round_codes(const float *weights, int64_t rows, int64_t num_in, int64_t group,
                        const float *steps, int64_t num_steps, float *room, uint8_t *codes,
                        float *scales) {
    const int64_t whole = (group + LANES - 1) / LANES * LANES;
    float *padded = room, *levels = room + whole, *tried = room + 2 * whole;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < num_in; first += group) {
            const int64_t left = num_in - first, count = left < group ? left : group;
            const float *from = weights + r * num_in + first;
            uint8_t *to = codes + r * num_in + first;
            memset(padded, 0, (size_t)whole * 4);
            memcpy(padded, from, (size_t)count * 4);
            *scales++ = round_group(padded, whole, steps, num_steps, levels, tried);
            for (int64_t i = 0; i < count; i++) to[i] = (uint8_t)(8 + (int)levels[i]);
        }
}
