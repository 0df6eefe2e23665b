// The weighted sum of gated experts over the rows routed to them:
//   sort (row, expert) pairs by slot; first products with silu(gate) * up, or its clamped kin; second
//   products; sums.
#include "arena.h"
#include "compute/matrix.h"
#include "compute/pool.h"

enum { BLOCK = 48 };             // routed rows whose inputs a thread copies side by side
enum { SUMMED = 16, FEW = 16 };  // rows added up in one task; rows that one thread adds up sooner
enum { HALF = PANEL / 2 };  // a panel of the first matrix: half a panel of gate, the same of up

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

// Of one row as floats or bytes, whichever takes more.
INLINE int64_t input_room(int64_t hidden) {
    return hidden * 4 > rounded_room(hidden) ? hidden * 4 : rounded_room(hidden);
}

EXPORT int64_t experts_scratch(int64_t rows, int64_t top_k, int64_t hidden, int64_t size,
                               int64_t num_slots, int threads) {
    const int64_t pairs = rows * top_k;
    return pairs * (hidden + size) * 4                                   // results, inner
           + pairs * rounded_room(size) + rows * rounded_room(hidden)    // the same rounded
           + pairs * 8 + num_slots * 4                                   // order
           + (int64_t)threads * BLOCK * input_room(hidden)               // inputs side by side
           + (pairs / BLOCK + num_slots + 1) * (int64_t)sizeof(struct block) + 1024;
}

// One call: its inputs, and the results of each step.
struct call {
    const struct expert *const *slots;
    const float *x, *weights;
    float *out;
    int64_t num_rows, hidden, size, top_k;
    const struct matrix *gate_up, *down;  // of any slot: all have the same form
    struct work work;
    struct rows x_rounded, inner_rounded;  // if the matrices take such
    float *inner, *results;
    uint8_t *inputs;
    int64_t gate_panels, gate_each, down_panels, down_each;  // each: panels of a block in one task
};

static struct rows room_for(struct arena *arena, const struct matrix *m, int64_t count) {
    const int64_t bytes = rounded_bytes(m), scales = rounded_scales(m);
    if (!bytes) return (struct rows){0};
    const void *data = take(arena, count * bytes);
    return (struct rows){data, bytes, take(arena, count * scales * 4), scales};
}

static void round_into(const struct matrix *m, const float *x, struct rows to, int64_t row) {
    round_row(m, x + row * m->num_in, (uint8_t *)to.data + row * to.stride,
              (float *)to.scales + row * to.scale_stride);
}

static void round_input(void *with, int64_t row, int worker) {
    const struct call *c = with;
    (void)worker;
    round_into(c->gate_up, c->x, c->x_rounded, row);
}

static void round_inner(void *with, int64_t row, int worker) {
    const struct call *c = with;
    (void)worker;
    round_into(c->down, c->inner, c->inner_rounded, row);
}

// A block's inputs side by side.
static struct rows gather(const struct call *c, struct block block, uint8_t *inputs) {
    const struct rows *from = &c->x_rounded;
    float *scales = (float *)(inputs + BLOCK * from->stride);
    for (int32_t i = 0; i < block.count; i++) {
        const int64_t row = c->work.row_of[block.first + i];
        if (from->data) {
            memcpy(inputs + i * from->stride, (const uint8_t *)from->data + row * from->stride,
                   (size_t)from->stride);
            memcpy(scales + i * from->scale_stride, from->scales + row * from->scale_stride,
                   (size_t)from->scale_stride * 4);
        } else {
            memcpy(inputs + i * c->hidden * 4, c->x + row * c->hidden, (size_t)c->hidden * 4);
        }
    }
    if (!from->data) return floats_in((float *)inputs, c->hidden);
    return (struct rows){inputs, from->stride, scales, from->scale_stride};
}

INLINE vec activated(const struct expert *e, vec gate, vec up) {
    if (e->limit == 0) return silu_of(gate) * up;
    const vec most = all(e->limit), least = all(-e->limit);  // NaN is neither more nor less
    gate = choose(gate > most, most, gate);
    up = choose(up > most, most, choose(up < least, least, up));
    return gate / (1.0f + exp_of(-e->slope * gate)) * (up + 1.0f);
}

static void multiply_gate_up(void *with, int64_t task, int worker) {
    const struct call *c = with;
    const int64_t groups = (c->gate_panels + c->gate_each - 1) / c->gate_each;
    const struct block block = c->work.blocks[task / groups];
    const struct expert *expert = c->slots[block.slot];
    float both[BLOCK * PANEL] __attribute__((aligned(64)));
    const struct rows rows = gather(c, block, c->inputs + worker * BLOCK * input_room(c->hidden));
    const int64_t begin = task % groups * c->gate_each;
    for (int64_t p = begin; p < begin + c->gate_each && p < c->gate_panels; p++) {
        multiply_panel(&expert->gate_up, rows, 0, block.count, p, both, PANEL, PANEL, 0);
        const int64_t left = c->size - p * HALF, columns = left < HALF ? left : HALF;
        for (int32_t i = 0; i < block.count; i++)
            for (int64_t column = 0; column < columns; column += LANES) {
                const float *gate = both + i * PANEL + column;
                const vec product = activated(expert, load(gate), load(gate + HALF));
                float *to = c->inner + (block.first + i) * c->size + p * HALF + column;
                if (columns - column >= LANES)
                    store(to, product);
                else
                    store_some(to, product, columns - column);
            }
    }
}

static void multiply_down(void *with, int64_t task, int worker) {
    const struct call *c = with;
    const int64_t groups = (c->down_panels + c->down_each - 1) / c->down_each;
    const struct block block = c->work.blocks[task / groups];
    const struct rows inner =
        c->inner_rounded.data ? c->inner_rounded : floats_in(c->inner, c->size);
    const int64_t begin = task % groups * c->down_each;
    (void)worker;
    for (int64_t p = begin; p < begin + c->down_each && p < c->down_panels; p++) {
        const int64_t left = c->hidden - p * PANEL;
        multiply_panel(&c->slots[block.slot]->down, inner, block.first, block.count, p,
                       c->results + block.first * c->hidden + p * PANEL, c->hidden,
                       left < PANEL ? left : PANEL, 0);
    }
}

// Adds up the experts of some rows, each row's in the order of their slots.
static void combine(void *with, int64_t task, int worker) {
    const struct call *c = with;
    (void)worker;
    const int64_t end = (task + 1) * SUMMED < c->num_rows ? (task + 1) * SUMMED : c->num_rows;
    for (int64_t row = task * SUMMED; row < end; row++) {
        const int32_t *routed = c->work.routed + row * c->top_k;
        float *out = c->out + row * c->hidden;
        memset(out, 0, (size_t)c->hidden * 4);
        for (int32_t last = -1;;) {
            int64_t best = -1;
            for (int64_t j = 0; j < c->top_k; j++)
                if (routed[j] > last && (best < 0 || routed[j] < routed[best])) best = j;
            if (best < 0) break;
            last = routed[best];
            const float weight = c->weights[row * c->top_k + best];
            const float *result = c->results + last * c->hidden;
            for (int64_t h = 0; h < c->hidden; h++) out[h] += weight * result[h];
        }
    }
}

EXPORT void sum_of_choices(float *results, int64_t num_rows, int64_t hidden, const float *weights,
                           int32_t *routed, int64_t top_k, float *out, int threads) {
    struct call c = {.weights = weights,
                     .out = out,
                     .num_rows = num_rows,
                     .hidden = hidden,
                     .top_k = top_k,
                     .work = {.routed = routed},
                     .results = results};
    in_parallel(combine, &c, (num_rows + SUMMED - 1) / SUMMED, num_rows < FEW ? 1 : threads);
}

// Panels of a block that are one task: with few blocks, threads share the panels.
INLINE int64_t panels_a_task(int64_t panels, int64_t blocks, int threads) {
    if (blocks >= 8 * threads) return panels;
    const int64_t each = panels * blocks / (8 * threads);
    return each > 1 ? each : 1;
}

EXPORT void experts(const struct expert *const *slots, int64_t num_slots, const float *x,
                    int64_t num_rows, int64_t hidden, int64_t size, const float *weights,
                    const int32_t *slot_ids, int64_t top_k, float *out, uint8_t *scratch,
                    int threads) {
    const int64_t pairs = num_rows * top_k;
    struct arena arena = {scratch};
    struct call c = {.slots = slots,
                     .x = x,
                     .weights = weights,
                     .out = out,
                     .num_rows = num_rows,
                     .hidden = hidden,
                     .size = size,
                     .top_k = top_k,
                     .gate_panels = (size + HALF - 1) / HALF,
                     .down_panels = (hidden + PANEL - 1) / PANEL};
    struct work *work = &c.work;
    work->row_of = take(&arena, pairs * 4);
    work->routed = take(&arena, pairs * 4);
    int32_t *next = take(&arena, num_slots * 4);
    c.inputs = take(&arena, threads * BLOCK * input_room(hidden));
    work->blocks = take(&arena, (pairs / BLOCK + num_slots + 1) * (int64_t)sizeof(struct block));
    sort_by_slot(work, slot_ids, pairs, top_k, num_slots, next);
    const int64_t routed = work->num_rows, blocks = work->num_blocks;
    c.results = take(&arena, routed * hidden * 4);
    c.inner = take(&arena, routed * size * 4);
    if (routed) {
        c.gate_up = &slots[work->blocks[0].slot]->gate_up;
        c.down = &slots[work->blocks[0].slot]->down;
        c.x_rounded = room_for(&arena, c.gate_up, num_rows);
        c.inner_rounded = room_for(&arena, c.down, routed);
    }
    c.gate_each = panels_a_task(c.gate_panels, blocks, threads);
    c.down_each = panels_a_task(c.down_panels, blocks, threads);

    const int few = num_rows < FEW ? 1 : threads;
    if (c.x_rounded.data) in_parallel(round_input, &c, num_rows, few);
    in_parallel(multiply_gate_up, &c, blocks * ((c.gate_panels + c.gate_each - 1) / c.gate_each),
                threads);
    if (c.inner_rounded.data) in_parallel(round_inner, &c, routed, few);
    in_parallel(multiply_down, &c, blocks * ((c.down_panels + c.down_each - 1) / c.down_each),
                threads);
    in_parallel(combine, &c, (num_rows + SUMMED - 1) / SUMMED, few);
}
