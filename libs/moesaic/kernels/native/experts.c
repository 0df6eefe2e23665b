// The weighted sum of SwiGLU experts over the rows routed to them, in one parallel region:
//   sort (row, expert) pairs by slot; first products with silu(gate) * up; second products; sums.
#include <omp.h>

#include "matrix.h"

enum { BLOCK = 48 };            // routed rows whose inputs a thread copies side by side
enum { HALF = PANEL / 2 };      // a panel of the first matrix: half a panel of gate, the same of up

struct expert {
    struct matrix gate_up;  // H -> 2I, each panel: HALF of gate, HALF of up
    struct matrix down;     // I -> H
};

struct block {
    int32_t slot, first, count;  // routed rows [first, first + count)
};

struct work {
    int64_t num_rows, num_blocks;  // routed rows, blocks
    int32_t *row_of;               // [R] the row that is routed
    int32_t *routed;               // [T * k] where a pair went, -1: its expert is not here
    struct block *blocks;
};

static void sort_by_slot(struct work *work, const int32_t *slot_ids, int64_t pairs, int64_t top_k,
                         int64_t num_slots, int32_t *next) {
    memset(next, 0, (size_t)num_slots * sizeof *next);
    for (int64_t i = 0; i < pairs; i++)
        if (slot_ids[i] >= 0) next[slot_ids[i]]++;
    int32_t start = 0;
    work->num_blocks = 0;
    for (int32_t slot = 0; slot < num_slots; slot++) {
        const int32_t count = next[slot];
        for (int32_t done = 0; done < count; done += BLOCK) {
            const int32_t left = count - done;
            work->blocks[work->num_blocks++] =
                (struct block){slot, start + done, left < BLOCK ? left : BLOCK};
        }
        next[slot] = start;
        start += count;
    }
    work->num_rows = start;
    for (int64_t i = 0; i < pairs; i++) {
        const int32_t slot = slot_ids[i];
        work->routed[i] = slot < 0 ? -1 : next[slot]++;
        if (slot >= 0) work->row_of[work->routed[i]] = (int32_t)(i / top_k);
    }
}

// Adds up a row's experts in the order of their slots.
static void combine(const struct work *work, const float *results, const float *weights,
                    int64_t row, int64_t top_k, int64_t hidden, float *out) {
    memset(out, 0, (size_t)hidden * 4);
    int32_t last = -1;
    for (int64_t n = 0; n < top_k; n++) {
        int64_t best = -1;
        for (int64_t j = 0; j < top_k; j++) {
            const int32_t at = work->routed[row * top_k + j];
            if (at > last && (best < 0 || at < work->routed[row * top_k + best])) best = j;
        }
        if (best < 0) return;
        last = work->routed[row * top_k + best];
        const float weight = weights[row * top_k + best], *result = results + last * hidden;
        for (int64_t h = 0; h < hidden; h++) out[h] += weight * result[h];
    }
}

// How many panels of a block one thread does.
INLINE int64_t share(int64_t panels, int64_t blocks, int threads) {
    if (blocks >= 8 * threads) return panels;
    const int64_t each = panels * blocks / (8 * threads);
    return each > 1 ? each : 1;
}

INLINE struct block block_of(const struct work *work, int64_t task, int64_t groups) {
    return work->blocks[task / groups];
}

// Bytes of `scratch` that `experts` needs.
EXPORT int64_t experts_scratch(int64_t rows, int64_t top_k, int64_t hidden, int64_t size,
                               int64_t num_slots, int threads) {
    const int64_t pairs = rows * top_k;
    return pairs * (hidden + size) * 4                      // results, inner
           + pairs * (size + 8) + rows * (hidden + 8)       // the same rounded, with scales
           + pairs * 8 + num_slots * 4                      // order
           + (int64_t)threads * BLOCK * hidden * 4          // inputs side by side
           + (pairs / BLOCK + num_slots + 1) * (int64_t)sizeof(struct block) + 1024;
}

struct arena {
    uint8_t *next;
};
static void *take(struct arena *arena, int64_t bytes) {
    void *taken = arena->next;
    arena->next += (bytes + 63) / 64 * 64;
    return taken;
}

// x [T, H], weights and slot_ids [T, k] (-1: not here) -> out [T, H].
EXPORT void experts(const struct expert *const *slots, int64_t num_slots, const float *x,
                    int64_t num_rows, int64_t hidden, int64_t size, const float *weights,
                    const int32_t *slot_ids, int64_t top_k, float *out, uint8_t *scratch,
                    int threads) {
    const int64_t pairs = num_rows * top_k;
    struct arena arena = {scratch};
    struct work work;
    work.row_of = take(&arena, pairs * 4);
    work.routed = take(&arena, pairs * 4);
    int32_t *next = take(&arena, num_slots * 4);
    float *all_inputs = take(&arena, threads * BLOCK * hidden * 4);
    work.blocks = take(&arena, (pairs / BLOCK + num_slots + 1) * (int64_t)sizeof(struct block));
    sort_by_slot(&work, slot_ids, pairs, top_k, num_slots, next);
    float *results = take(&arena, work.num_rows * hidden * 4);
    float *inner = take(&arena, work.num_rows * size * 4);

    const int int8 = work.num_rows && slots[work.blocks[0].slot]->down.scales != 0;
    const int64_t wide = (hidden + 3) / 4 * 4, narrow = (size + 3) / 4 * 4;
    float *x_scales = 0, *inner_scales = 0;
    uint8_t *x_bytes = 0, *inner_bytes = 0;
    if (int8) {
        x_scales = take(&arena, num_rows * 4);
        x_bytes = take(&arena, num_rows * wide);
        inner_scales = take(&arena, work.num_rows * 4);
        inner_bytes = take(&arena, work.num_rows * narrow);
    }
    const int64_t gate_panels = (size + HALF - 1) / HALF, down_panels = (hidden + PANEL - 1) / PANEL;
    // Of few blocks, threads share the panels.
    const int64_t gate_each = share(gate_panels, work.num_blocks, threads);
    const int64_t down_each = share(down_panels, work.num_blocks, threads);
    const int64_t gate_groups = (gate_panels + gate_each - 1) / gate_each;
    const int64_t down_groups = (down_panels + down_each - 1) / down_each;

#pragma omp parallel num_threads(threads)
    {
        if (int8) {
#pragma omp for
            for (int64_t t = 0; t < num_rows; t++)
                x_scales[t] = round_row(x + t * hidden, hidden, x_bytes + t * wide);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < work.num_blocks * gate_groups; task++) {
            const struct block block = block_of(&work, task, gate_groups);
            const struct matrix *gate_up = &slots[block.slot]->gate_up;
            float *inputs = all_inputs + omp_get_thread_num() * BLOCK * hidden;
            float scales[BLOCK], both[BLOCK * PANEL] __attribute__((aligned(64)));
            struct rows rows = {inputs, 0, hidden};
            if (int8) rows = (struct rows){inputs, scales, wide};
            for (int32_t i = 0; i < block.count; i++) {
                const int64_t row = work.row_of[block.first + i];
                if (int8) {
                    memcpy((uint8_t *)inputs + i * wide, x_bytes + row * wide, (size_t)wide);
                    scales[i] = x_scales[row];
                } else {
                    memcpy(inputs + i * hidden, x + row * hidden, (size_t)hidden * 4);
                }
            }
            const int64_t begin = task % gate_groups * gate_each;
            for (int64_t p = begin; p < begin + gate_each && p < gate_panels; p++) {
                multiply_panel(gate_up, rows, 0, block.count, p, both, PANEL, PANEL, 0);
                const int64_t column = p * HALF;
                const int64_t columns = size - column < HALF ? size - column : HALF;
                for (int32_t i = 0; i < block.count; i++)
                    for (int64_t c = 0; c < columns; c += LANES) {
                        const float *gate = both + i * PANEL + c, *up = gate + HALF;
                        const vec product = silu_of(load(gate)) * load(up);
                        float *to = inner + (block.first + i) * size + column + c;
                        if (columns - c >= LANES)
                            store(to, product);
                        else
                            store_some(to, product, columns - c);
                    }
            }
        }
        if (int8) {
#pragma omp for
            for (int64_t r = 0; r < work.num_rows; r++)
                inner_scales[r] = round_row(inner + r * size, size, inner_bytes + r * narrow);
        }
        const struct rows inners =
            int8 ? (struct rows){inner_bytes, inner_scales, narrow} : (struct rows){inner, 0, size};
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < work.num_blocks * down_groups; task++) {
            const struct block block = block_of(&work, task, down_groups);
            const int64_t begin = task % down_groups * down_each;
            for (int64_t p = begin; p < begin + down_each && p < down_panels; p++) {
                const int64_t left = hidden - p * PANEL;
                multiply_panel(&slots[block.slot]->down, inners, block.first, block.count, p,
                               results + block.first * hidden + p * PANEL, hidden,
                               left < PANEL ? left : PANEL, 0);
            }
        }
#pragma omp for
        for (int64_t t = 0; t < num_rows; t++)
            combine(&work, results, weights, t, top_k, hidden, out + t * hidden);
    }
}
