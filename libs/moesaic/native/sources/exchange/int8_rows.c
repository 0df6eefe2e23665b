#include "exchange/int8_rows.h"

#include <float.h>
#include <string.h>

static const int32_t INFINITE = 0x7f800000;  // bits; those of a NaN are more

// The largest of a row over 127. 0: it has none that is not tiny; NaN: some number is not finite.
static float scale_of(const float *row, int64_t hidden) {
    int32_t most = 0;
    for (int64_t i = 0; i < hidden; i++) {
        int32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    if (most >= INFINITE) return __builtin_nanf("");
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const float scale = largest / 127;
    return scale < FLT_MIN ? 0 : scale;
}

EXPORT void pack_int8_rows(const float *rows, int64_t count, int64_t hidden, int8_t *packed) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, half to even
    for (; count--; rows += hidden, packed += hidden + SCALE_BYTES) {
        const float scale = scale_of(rows, hidden);
        memcpy(packed + hidden, &scale, sizeof scale);
        if (!(scale > 0)) {
            memset(packed, 0, (size_t)hidden);
            continue;
        }
        for (int64_t i = 0; i < hidden; i++) {
            const float shifted = rows[i] / scale + shift;
            int32_t bits;  // its lowest byte is the number
            memcpy(&bits, &shifted, sizeof bits);
            packed[i] = (int8_t)bits;
        }
    }
}

EXPORT void unpack_int8_rows(const int8_t *packed, int64_t count, int64_t hidden, float *rows) {
    for (; count--; rows += hidden, packed += hidden + SCALE_BYTES) {
        float scale;
        memcpy(&scale, packed + hidden, sizeof scale);
        for (int64_t i = 0; i < hidden; i++) rows[i] = (float)packed[i] * scale;
    }
}

void add_int8_rows(float *sum, const int8_t *packed, int64_t count, int64_t hidden) {
    for (; count--; sum += hidden, packed += hidden + SCALE_BYTES) {
        float scale;
        memcpy(&scale, packed + hidden, sizeof scale);
        for (int64_t i = 0; i < hidden; i++) sum[i] += (float)packed[i] * scale;
    }
}
