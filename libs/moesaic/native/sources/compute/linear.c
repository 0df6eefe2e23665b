#include "compute/matrix.h"
#include "compute/pool.h"

enum { BLOCK = 96 };  // rows that are multiplied with a panel while it is in the cache
enum { RUNS = 8 };    // of panels, for each thread

struct product {
    const struct matrix *matrices;
    const float *x;
    float *out;
    int64_t x_stride, x_head_stride, out_stride, out_head_stride, count;
    struct rows rounded;  // to bytes, if the matrix takes such
    int64_t blocks, parts, panels;  // of rows; of panels, for each block; panels
};

static void round_one(void *with, int64_t row, int worker) {
    const struct product *p = with;
    const struct rows *to = &p->rounded;
    (void)worker;
    round_row(p->matrices, p->x + row * p->x_stride, (uint8_t *)to->data + row * to->stride,
              (float *)to->scales + row * to->scale_stride);
}

static void multiply_part(void *with, int64_t task, int worker) {
    const struct product *p = with;
    const int64_t head = task / (p->blocks * p->parts), block = task / p->parts % p->blocks;
    const struct matrix *m = &p->matrices[head];
    const struct rows floats = floats_in(p->x + head * p->x_head_stride, p->x_stride);
    const struct rows rows = p->rounded.data ? p->rounded : floats;
    const int64_t first = block * BLOCK, left = p->count - first;
    const int64_t part = task % p->parts;
    (void)worker;
    for (int64_t panel = part * p->panels / p->parts; panel < (part + 1) * p->panels / p->parts;
         panel++) {
        const int64_t column = panel * PANEL;
        float *out = p->out + first * p->out_stride + head * p->out_head_stride + column;
        multiply_panel(m, rows, first, left < BLOCK ? left : BLOCK, panel, out, p->out_stride,
                       m->num_out - column < PANEL ? m->num_out - column : PANEL, 0);
    }
}

EXPORT int64_t linear_scratch(const struct matrix *matrix) {
    return rounded_bytes(matrix) + rounded_scales(matrix) * 4;
}

EXPORT void linear(const struct matrix *matrices, int64_t heads, const float *x, int64_t x_stride,
                   int64_t x_head_stride, int64_t count, float *out, int64_t out_stride,
                   int64_t out_head_stride, uint8_t *scratch, int threads) {
    const int64_t panels = num_panels(matrices), blocks = (count + BLOCK - 1) / BLOCK;
    // Of few rows, threads share the weights, and of one tile in runs: memory sets the pace, and gives what lies
    // side by side sooner. Of many, they share the rows.
    const int64_t runs = count <= TILE_ROWS && panels > RUNS * threads ? RUNS * threads : panels;
    const int64_t parts = heads * blocks >= 4 * threads ? 1 : runs;
    struct product p = {.matrices = matrices,
                        .x = x,
                        .out = out,
                        .x_stride = x_stride,
                        .x_head_stride = x_head_stride,
                        .out_stride = out_stride,
                        .out_head_stride = out_head_stride,
                        .count = count,
                        .blocks = blocks,
                        .parts = parts,
                        .panels = panels};
    const int64_t bytes = rounded_bytes(matrices), scales = rounded_scales(matrices);
    if (bytes) {
        p.rounded = (struct rows){scratch + count * scales * 4, bytes, (float *)scratch, scales};
        in_parallel(round_one, &p, count, count * matrices->num_in < 4096 ? 1 : threads);
    }
    in_parallel(multiply_part, &p, heads * blocks * parts, threads);
}
