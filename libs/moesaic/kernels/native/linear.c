#include "matrix.h"

enum { BLOCK = 96 };  // rows that are multiplied with a panel while it is in the cache

INLINE int64_t columns_of(const struct matrix *m, int64_t panel) {
    const int64_t left = m->out - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

// x [count, heads, in] -> out [count, heads, out], a matrix for each head; strides in floats.
// int8 takes one head, and `scratch` of count * (in_fours * 4 + 4) bytes.
EXPORT void linear(const struct matrix *matrices, int64_t heads, const float *x, int64_t x_stride,
                   int64_t x_head_stride, int64_t count, float *out, int64_t out_stride,
                   int64_t out_head_stride, uint8_t *scratch, int threads) {
    const int int8 = matrices->scales != 0;
    const int64_t panels = num_panels(matrices), width = in_fours(matrices) * 4;
    float *scales = (float *)scratch;
    uint8_t *bytes = scratch + count * 4;
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    // Of few rows, threads share the weights; of many, the rows.
    const int64_t parts = blocks > 1 ? 1 : panels, each = panels / parts;
#pragma omp parallel num_threads(threads)
    {
        if (int8) {
#pragma omp for
            for (int64_t i = 0; i < count; i++)
                scales[i] = round_row(x + i * x_stride, matrices->in, bytes + i * width);
        }
#pragma omp for schedule(dynamic, blocks > 1 ? 1 : (heads * panels + threads - 1) / threads)
        for (int64_t task = 0; task < heads * blocks * parts; task++) {
            const int64_t head = task / (blocks * parts), block = task / parts % blocks;
            const struct matrix *m = &matrices[head];
            const struct rows rows = int8
                                         ? (struct rows){bytes, scales, width}
                                         : (struct rows){x + head * x_head_stride, 0, x_stride};
            const int64_t first = block * BLOCK;
            const int64_t some = count - first < BLOCK ? count - first : BLOCK;
            for (int64_t p = task % parts * each; p < (task % parts + 1) * each; p++)
                multiply_panel(m, rows, first, some, p,
                               out + first * out_stride + head * out_head_stride + p * PANEL,
                               out_stride, columns_of(m, p), 0);
        }
    }
}
