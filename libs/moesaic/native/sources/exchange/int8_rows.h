// Rows as bytes, as moesaic.experts.wire_rows describes them: each ends with its scale.
#ifndef MOESAIC_INT8_ROWS_H
#define MOESAIC_INT8_ROWS_H

#include "calls.h"

enum { SCALE_BYTES = 4 };

// Adds rows [count, hidden + 4] to sum [count, hidden]: the bits of a sum with what they stand for.
void add_int8_rows(float *sum, const int8_t *packed, int64_t count, int64_t hidden);

#endif
