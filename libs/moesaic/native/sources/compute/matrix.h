// A constant matrix, packed for products with a few or many rows: x [rows, num_in] -> [rows, num_out].
//   Panels   PANEL outputs lie side by side, input after input, so that a product reads one stream.
//   float    32 bits, or 16, which are widened in registers: products and sums are float32.
//            bfloat16: a word has the numbers of two neighbouring vectors.
//   int8     four inputs lie together (VNNI); x is rounded to unsigned bytes around ZERO;
//            or, without VNNI, to signed ones.
//   int4     of a BLOCK of inputs, the low halves of bytes have the first 16, the high ones the others, four
//            together; x is rounded to signed bytes with a scale for each group of inputs, which has several blocks.
//   fp8      a byte each, widened by way of float16; a scale for each group of inputs.
//   Order    every result is one sum over the inputs in order: its bits depend on its row alone.
#ifndef MOESAIC_MATRIX_H
#define MOESAIC_MATRIX_H

#include "calls.h"
#include "vector.h"

enum { ZERO = 128, LEVELS = 127, GROUP_BLOCK = 32 };
enum form { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, FP8 };

#if defined(__AVX512VNNI__)
enum { AROUND = ZERO };
#else
enum { AROUND = 0 };  // of int8: instructions that take unsigned bytes would saturate: rows are signed bytes
#endif

// Rows to multiply: floats, or bytes with scales.
struct rows {
    const void *data;
    int64_t stride;        // in elements
    const float *scales;   // none: floats. int4: of each group, then each group's sum of bytes
    int64_t scale_stride;  // of a row's
};

INLINE struct rows floats_in(const float *data, int64_t stride) {
    return (struct rows){data, stride, 0, 0};
}

INLINE int64_t num_panels(const struct matrix *m) { return (m->num_out + PANEL - 1) / PANEL; }
INLINE int64_t in_fours(int64_t num_in) { return (num_in + 3) / 4; }
INLINE int64_t in_blocks(int64_t num_in) { return (num_in + GROUP_BLOCK - 1) / GROUP_BLOCK; }
INLINE int64_t num_groups(const struct matrix *m) { return (m->num_in + m->group - 1) / m->group; }

// Of one row of x, as this matrix takes it: bytes and their scales; 0: it takes floats.
INLINE int64_t rounded_bytes(const struct matrix *m) {
    if (m->form == INT8) return in_fours(m->num_in) * 4;
    return m->form == INT4 ? in_blocks(m->num_in) * GROUP_BLOCK : 0;
}
INLINE int64_t rounded_scales(const struct matrix *m) {
    if (m->form == INT8) return 1;
    return m->form == INT4 ? 2 * num_groups(m) : 0;
}
// Room for both, whatever the form.
INLINE int64_t rounded_room(int64_t num_in) { return in_blocks(num_in) * (GROUP_BLOCK + 8) + 8; }

// The product of some rows with one panel. Writes `columns` (at most PANEL) of each row; `onto`
// what is there already (float32 only).
void multiply_panel(const struct matrix *m, struct rows x, int64_t first, int64_t count,
                    int64_t panel, float *out, int64_t out_stride, int64_t columns, int onto);

// Rounds a row of floats to the bytes and scales that this matrix takes.
void round_row(const struct matrix *m, const float *from, uint8_t *to, float *scales);

#endif
