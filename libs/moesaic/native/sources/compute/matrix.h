// A constant matrix, packed for products with a few or many rows: x [rows, num_in] -> [rows, num_out].
//   Panels   PANEL outputs lie side by side, input after input, so that a product reads one stream.
//   int8     four inputs lie together (VNNI); x is rounded to unsigned bytes around ZERO;
//            or, without VNNI, to signed ones.
//   Order    every result is one sum over the inputs in order: its bits depend on its row alone.
#ifndef MOESAIC_MATRIX_H
#define MOESAIC_MATRIX_H

#include "calls.h"
#include "compute/vector.h"

enum { ZERO = 128, LEVELS = 127 };

// Rows to multiply: floats, or bytes with a scale each.
struct rows {
    const void *data;
    const float *scales;  // none: floats
    int64_t stride;       // in elements
};

INLINE int64_t num_panels(const struct matrix *m) { return (m->num_out + PANEL - 1) / PANEL; }
INLINE int64_t in_fours(const struct matrix *m) { return (m->num_in + 3) / 4; }

// The product of some rows with one panel. Writes `columns` (at most PANEL) of each row; `onto`
// what is there already (float32 only).
void multiply_panel(const struct matrix *m, struct rows x, int64_t first, int64_t count,
                    int64_t panel, float *out, int64_t out_stride, int64_t columns, int onto);

// Rounds a row of floats to bytes and returns its scale; `to` has room for in_fours * 4.
float round_row(const float *from, int64_t size, uint8_t *to);

#endif
