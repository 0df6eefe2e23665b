#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include "compute/matrix.h"
#include "exchange/int8_rows.h"

static void *own(struct layer_here *layer, void *memory) {
    CHECK(layer->num_owned < 128);
    return layer->owned[layer->num_owned++] = memory;
}

static void *own_copy(struct layer_here *layer, const void *from, int64_t bytes) {
    return own(layer, exact_copy(from, bytes));
}

static struct matrix float_matrix(struct layer_here *layer, int64_t out, int64_t in) {
    const int64_t whole = (out + panel_width() - 1) / panel_width() * panel_width();
    float *weight = any_floats(out * in), *panels = own(layer, exact(whole * in * 4));
    memset(panels, 0, (size_t)(whole * in) * 4);
    pack_stored(weight, FLOAT32, out, 1, in, FLOAT32, panels);
    free(weight);
    return (struct matrix){.panels = panels, .num_in = in, .num_out = out};
}

static struct matrix int8_matrix(struct layer_here *layer, int64_t out, int64_t in) {
    const int64_t whole = (out + panel_width() - 1) / panel_width() * panel_width();
    const int64_t bytes = whole * ((in + 3) / 4 * 4);
    float *weight = exact(out * in * 4), *scales = own(layer, exact(whole * 4));
    for (int64_t i = 0; i < out * in; i++) weight[i] = (float)between(-127, 127);
    int8_t *panels = own(layer, exact(bytes));
    int32_t *offsets = own(layer, exact(whole * 4));
    pack_stored_int8(weight, FLOAT32, out, 1, in, panels, scales, offsets);
    free(weight);
    return (struct matrix){.panels = panels,
                           .scales = one_in(2) ? scales : own(layer, any_floats(whole)),
                           .offsets = offsets,
                           .num_in = in,
                           .num_out = out,
                           .form = INT8};
}

// Each worker's replicas are numbered on from the last one's; every expert has a holder that lives.
static void place_replicas(struct layer_here *layer, int64_t num_experts, const uint8_t *live) {
    struct answerable *is = &layer->is;
    int held[MOST_EXPERTS][MOST_WORKERS] = {{0}};
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t holder;
        do holder = below(is->num_workers);
        while (!live[holder]);
        held[e][holder] = 1;
        for (int64_t n = 0; n < is->num_workers; n++) held[e][n] |= live[n] && one_in(3);
    }
    int32_t next = 0;
    for (int64_t n = 0; n < is->num_workers; n++) {
        if (n == is->worker) is->first = next;
        for (int64_t e = 0; e < num_experts; e++)
            layer->replicas[e * is->num_workers + n] = held[e][n] ? next++ : -1;
        if (n == is->worker) is->end = next;
    }
    is->num_slots = is->end - is->first;
}

void make_layer(struct layer_here *layer, uint64_t epoch, int64_t index) {
    const int64_t workers = between(1, MOST_WORKERS), num_own = between(1, MOST_OWN);
    const int64_t way = one_in(3) ? 0 : between(2, 4);
    const int64_t num_experts = num_own + (way ? (num_own + way - 1) / way : 0);
    const int64_t hidden = between(1, 40), size = between(1, 40), half = panel_width() / 2;
    const int in_int8 = one_in(3);
    *layer = (struct layer_here){.is = {.epoch = epoch,
                                        .layer = index,
                                        .num_experts = num_experts,
                                        .num_workers = workers,
                                        .worker = below(workers),
                                        .counts = one_in(2)}};
    struct answerable *is = &layer->is;
    uint8_t live[MOST_WORKERS];
    int64_t basis[1 + MOST_WORKERS] = {below(3)}, costs[2][MOST_WORKERS];
    is->basis_size = 1;
    for (int64_t n = 0; n < workers; n++) {
        live[n] = n == is->worker || !one_in(3);
        if (live[n]) basis[is->basis_size++] = n;
        costs[0][n] = below(100), costs[1][n] = below(10);
    }
    if (one_in(2)) memset(costs, 0, sizeof costs), costs[0][0] = 1;
    if (one_in(2))
        for (int64_t n = 0; n < workers; n++) costs[0][n] = 1, costs[1][n] = 0;
    place_replicas(layer, num_experts, live);
    is->basis = own_copy(layer, basis, is->basis_size * 8);
    is->replicas = own_copy(layer, layer->replicas, num_experts * workers * 4);
    is->live = own_copy(layer, live, workers);
    is->weights = own_copy(layer, costs[0], workers * 8);
    is->row = own_copy(layer, costs[1], workers * 8);
    for (int64_t slot = 0; slot < is->num_slots; slot++) {
        const int64_t mixed = (size + half - 1) / half * half * 2;
        layer->experts[slot] = (struct expert){
            in_int8 ? int8_matrix(layer, mixed, hidden) : float_matrix(layer, mixed, hidden),
            in_int8 ? int8_matrix(layer, hidden, size) : float_matrix(layer, hidden, size),
            one_in(2) ? 1.7f : 0.0f, one_in(2) ? 2.0f : 0.0f};
        layer->slots[slot] = &layer->experts[slot];
    }
    int32_t homes[MOST_OWN];
    for (int64_t e = 0; e < num_own; e++) homes[e] = (int32_t)below((uint64_t)num_own);
    is->moe = (struct moe){.gate = float_matrix(layer, num_own, hidden),
                           .substitution =
                               {.num_experts = num_own,
                                .way = way,
                                .homes = one_in(2) ? own_copy(layer, homes, num_own * 4) : 0,
                                .instead = way ? 0 : (int32_t)between(1, 2)},
                           .slots = own_copy(layer, layer->slots, is->num_slots * 8),
                           .size = size,
                           .top_k = between(1, num_own < 4 ? num_own : 4),
                           .gating = {.correction = one_in(2) ? own(layer, any_floats(num_own)) : 0,
                                      .num_groups = 1,
                                      .kept_groups = 1,
                                      .scaling = (float)between(1, 3),
                                      .epsilon = 1e-20f,
                                      .normalise = one_in(2),
                                      .sigmoid = one_in(2)}};
    if (num_own % 2 == 0 && is->moe.top_k <= num_own / 2 && one_in(2))
        is->moe.gating.num_groups = 2, is->moe.gating.group_best = between(1, 2);
}

void free_layer(struct layer_here *layer) {
    while (layer->num_owned) free(layer->owned[--layer->num_owned]);
}

// Promises to rows, as a body has them; its size.
static int64_t any_promises(uint8_t *body, int64_t rows) {
    const int32_t num_levels = (int32_t)between(1, 4);
    uint8_t *to = body;
    memcpy(to, &num_levels, 4), to += 4;
    for (int32_t l = 0; l < num_levels; l++) {
        const int32_t level[2] = {one_in(4) ? 10000 : (int32_t)between(0, 10000), (int32_t)below(2)};
        memcpy(to, level, 8), to += 8;
    }
    for (int64_t t = 0; t < rows && num_levels > 1; t++) *to++ = (uint8_t)below(num_levels);
    return to - body;
}

// True if a body promises something to so many rows.
static int has_promises(const uint8_t *body, int64_t size, int64_t rows) {
    int32_t num_levels, level[2];
    if (size < 4) return 0;
    memcpy(&num_levels, body, 4);
    if (num_levels < 1 || num_levels > 255) return 0;
    if (size != 4 + 8 * (int64_t)num_levels + (num_levels > 1 ? rows : 0)) return 0;
    for (int32_t l = 0; l < num_levels; l++) {
        memcpy(level, body + 4 + 8 * l, 8);
        if (level[0] < 0 || level[0] > 10000) return 0;
    }
    for (int64_t t = 0; t < rows && num_levels > 1; t++)
        if (body[4 + 8 * num_levels + t] >= num_levels) return 0;
    return 1;
}

struct message request_for(const struct layer_here *layer, int64_t rows, int in_bytes, int loads,
                           int promised) {
    const struct answerable *is = &layer->is;
    const int64_t hidden = is->moe.gate.num_in, size = is->basis_size;
    struct frame_head head = {.kind = FRAME_REQUEST,
                              .num_tensors = 2,
                              .layer = (int32_t)is->layer,
                              .threshold = one_in(2) ? 1 : (float)below(5) / 4,
                              .epoch = is->epoch,
                              .seq = any(),
                              .digest = one_in(2) ? 0 : any()};
    head.tensors[0] = (struct tensor_place){in_bytes ? FRAME_INT8 : FRAME_FLOAT32, (uint32_t)rows,
                                            (uint32_t)(hidden + in_bytes * SCALE_BYTES), 0};
    head.tensors[1] = (struct tensor_place){FRAME_INT64, 1 + loads, (uint32_t)size, 0};
    scramble(head.request_id, sizeof head.request_id);
    uint8_t body[4 + 4 * 8 + 256];
    CHECK(rows <= 256);
    if (promised) head.flags = FRAME_PROMISED, head.body_size = any_promises(body, rows);
    struct message m = frame_of(&head);
    memcpy(m.bytes + head.body_start, body, (size_t)head.body_size);
    if (head.body_size && one_in(8)) m.bytes[head.body_start + below(head.body_size)] ^= 1 << below(8);
    uint8_t *to = m.bytes + head.tensors[0].start;
    for (int64_t i = 0; i < rows * hidden && !in_bytes; i++, to += 4) {
        const float number = any_float();
        memcpy(to, &number, 4);
    }
    for (int64_t row = 0; row < rows && in_bytes; row++) {
        const float scale = any_float() / 100;
        memcpy(to + row * (hidden + SCALE_BYTES) + hidden, &scale, 4);
    }
    memcpy(m.bytes + head.tensors[1].start, is->basis, (size_t)size * 8);
    int64_t *load = (int64_t *)(m.bytes + head.tensors[1].start) + size;
    for (int64_t i = 0; i < size && loads; i++) load[i] = i ? below(1000) : 0;
    frame_seal(m.bytes, &head);
    return m;
}

int is_request_for(const struct layer_here *layer, const uint8_t *message,
                   const struct frame_head *head) {
    const struct answerable *is = &layer->is;
    const struct tensor_place *rows = &head->tensors[0], *basis = &head->tensors[1];
    if (head->kind != FRAME_REQUEST || head->epoch != is->epoch || head->layer != is->layer)
        return 0;
    if (head->num_tensors != 2 || !rows->rows) return 0;
    if (head->flags != (head->body_size ? FRAME_PROMISED : 0)) return 0;
    if (head->flags && !has_promises(message + head->body_start, head->body_size, rows->rows))
        return 0;
    if (rows->code != FRAME_FLOAT32 && rows->code != FRAME_INT8) return 0;
    if (rows->cols != is->moe.gate.num_in + (rows->code == FRAME_INT8 ? 4 : 0)) return 0;
    if (basis->code != FRAME_INT64 || basis->cols != is->basis_size) return 0;
    if (basis->rows != 1 && basis->rows != 2) return 0;
    const int64_t *numbers = (const int64_t *)(message + basis->start);
    const int64_t *loads = numbers + basis->cols;
    for (uint32_t i = 0; i < basis->cols; i++) {
        if (numbers[i] != is->basis[i]) return 0;
        if (basis->rows == 2 && (loads[i] < 0 || loads[i] > (i ? 1ll << 40 : 0))) return 0;
    }
    return 1;
}
