// What the parts of attention have in common.
#ifndef MOESAIC_ATTENTION_H
#define MOESAIC_ATTENTION_H

#include "matrix.h"

struct sequence {
    int64_t first_row, num_rows;  // of this step
    int64_t length;               // positions, this step's included
    const int32_t *blocks;        // block table
};

// The sequences of a step, as the planner has them.
struct batch {
    const int32_t *first_rows, *num_rows, *lengths, *block_tables;
    int64_t count, table_width;
};

struct shape {
    int64_t heads, kv_heads;
    int64_t key_dim, value_dim;
    // In the cache, in floats. A key_stride other than 1: of a block, a head's keys lie dimension by
    // dimension, LANES tokens and more of it side by side.
    int64_t block_stride, head_stride, token_stride, key_stride, value_start, value_stride;
    int64_t block_size, window;                                    // window 0: none
    int64_t query_stride, out_stride;                              // between rows
    float scale;
};

// The queries of one task that share a head's keys and values.
struct queries {
    const struct shape *shape;
    int64_t kv_head, group;  // heads that share the keys and values
    int64_t first_row, num;  // of the step; rows * group
    int64_t position;        // of the first row
};

// What one thread works with.
struct desk {
    float *queries;           // [QUERIES, key_dim], scaled
    float *scores;            // [QUERIES, PANEL]
    float *sums;              // [QUERIES, values]
    float *largest, *totals;  // [QUERIES]
    float *keys;              // [key_dim, PANEL]
    float *values;            // [panels, PANEL, PANEL]
};

// Where a tile's keys and values are; how many there are yet.
struct found {
    const float *keys[PANEL], *values[PANEL];
    int64_t count;
};

INLINE int64_t wide(int64_t size) { return (size + PANEL - 1) / PANEL * PANEL; }

// Takes the queries over, and has nothing summed up yet.
void begin(const struct queries *q, const float *queries, const struct desk *d);
// Finds the PANEL positions from `start` on, as far as there are any.
void find(const struct shape *s, const struct sequence *q, const float *cache, int64_t kv_head,
          int64_t start, struct found *f);
// Attends to the positions from `start` on, which are `here`; what comes `next` is asked for meanwhile.
void attend_tile(const struct queries *q, const struct found *here, const struct found *next,
                 int64_t start, const struct desk *d);
// Writes what has been attended to.
void finish(const struct queries *q, const struct desk *d, float *out);

#endif
