#include "exchange/promised.h"

#include <string.h>

enum { NUMBER = 4, LEVEL = 8, MOST_LEVELS = 255, WHOLE = 10000 };

int64_t promises_size(const struct promises *promises, int64_t count) {
    if (!promises) return 0;
    return NUMBER + promises->num_levels * LEVEL + (promises->num_levels > 1 ? count : 0);
}

void write_promises(uint8_t *body, const struct promises *promises, int64_t count) {
    if (!promises) return;
    const int32_t num_levels = (int32_t)promises->num_levels;
    memcpy(body, &num_levels, NUMBER);
    for (int64_t l = 0; l < num_levels; l++) {
        const int32_t level[2] = {promises->thresholds[l], promises->phases[l]};
        memcpy(body + NUMBER + l * LEVEL, level, LEVEL);
    }
    if (num_levels > 1) memcpy(body + NUMBER + num_levels * LEVEL, promises->level_of_row, (size_t)count);
}

float lowest_threshold(const struct promises *promises) {
    int32_t lowest = WHOLE;
    for (int64_t l = 0; promises && l < promises->num_levels; l++)
        if (promises->thresholds[l] < lowest) lowest = promises->thresholds[l];
    return (float)((double)lowest / WHOLE);
}

int read_promises(const uint8_t *body, int64_t size, int64_t count, struct read_promises *read) {
    int32_t num_levels;
    if (size < NUMBER) return 0;
    memcpy(&num_levels, body, NUMBER);
    if (num_levels < 1 || num_levels > MOST_LEVELS) return 0;
    const int64_t start = NUMBER + (int64_t)num_levels * LEVEL;
    if (size != start + (num_levels > 1 ? count : 0)) return 0;
    for (int32_t l = 0; l < num_levels; l++) {
        int32_t level[2];
        memcpy(level, body + NUMBER + l * LEVEL, LEVEL);
        if (level[0] < 0 || level[0] > WHOLE) return 0;
        read->thresholds[l] = level[0], read->phases[l] = level[1];
    }
    const uint8_t *rows = num_levels > 1 ? body + start : 0;
    for (int64_t t = 0; rows && t < count; t++)
        if (rows[t] >= num_levels) return 0;
    read->is = (struct promises){read->thresholds, read->phases, rows, num_levels};
    return 1;
}
