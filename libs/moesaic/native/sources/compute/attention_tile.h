// A tile of attention, and what it works on.
#ifndef MOESAIC_ATTENTION_TILE_H
#define MOESAIC_ATTENTION_TILE_H

#include "compute/matrix.h"

enum { STRETCH = PANEL < 64 ? 64 : PANEL };  // positions of a tile, whole panels

struct sequence {
    int64_t first_row, num_rows;  // of this step
    int64_t length;               // positions, this step's included
    const int32_t *blocks;        // block table
};

// The queries of one task that share a head's keys and values.
struct queries {
    const struct shape *shape;
    int64_t kv_head, group;  // heads that share the keys and values
    int64_t first_row, num;  // of the step; rows * group
    int64_t position;        // of the first row
};

// The memory of one thread.
struct desk {
    float *queries;           // [QUERIES, key_dim], scaled
    float *scores;            // [QUERIES, STRETCH]
    float *sums;              // [QUERIES, values]
    float *largest, *totals;  // [QUERIES]
    float *keys;              // [panels of positions, key_dim, PANEL]
    float *values;            // [panels of values, positions that there are, PANEL]
};

// The addresses of a tile's keys and values, `count` so far.
struct found {
    const float *keys[STRETCH], *values[STRETCH];
    int64_t count;
};

INLINE int64_t wide(int64_t size) { return (size + PANEL - 1) / PANEL * PANEL; }

// Takes the queries over, and has nothing summed up yet.
void begin(const struct queries *q, const float *queries, const struct desk *d);
// Finds the STRETCH positions from `start` on, as far as there are any.
void find(const struct shape *s, const struct sequence *q, const float *cache, int64_t kv_head,
          int64_t start, struct found *f);
// Attends to the positions from `start` on, which are `here`, and prefetches the `next` ones.
void attend_tile(const struct queries *q, const struct found *here, const struct found *next,
                 int64_t start, const struct desk *d);
// Writes the result.
void finish(const struct queries *q, const struct desk *d, float *out);

#endif
