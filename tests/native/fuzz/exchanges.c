// Exchanges of chance: questions, and the answers of each peer.
#include <stdlib.h>
#include <string.h>

#include "exchange/int8_rows.h"
#include "peers.h"

enum { CALLS_FROM = 63 };  // bit of the first call that is awaited without Python

static void *own(struct exchange *x, void *memory) {
    CHECK(x->num_owned < 16);
    return x->owned[x->num_owned++] = memory;
}

struct frame_limits limits_of(const struct exchange *x) {
    return (struct frame_limits){x->ask.max_rows, x->ask.max_cols, x->ask.max_bytes};
}

static int64_t columns_of(const struct exchange *x) {
    return x->ask.hidden + (x->ask.code == FRAME_INT8 ? SCALE_BYTES : 0);
}

enum decision decides(const struct exchange *x, int call, struct message m,
                      struct frame_head *head) {
    const struct frame_limits limits = limits_of(x);
    if (!read_plainly(m.bytes, m.size, &limits, head)) return NO_FRAME;
    if (head->kind != FRAME_REPLY && head->kind != FRAME_ERROR) return NOTHING_YET;
    if (head->seq != x->asked.seq + (uint64_t)call) return NOTHING_YET;
    const struct tensor_place *part = &head->tensors[0], *loads = &head->tensors[1];
    const int has_loads = x->asked.basis_rows == 2, is_promised = x->asked.promises != 0;
    const struct tensor_place *degraded = &head->tensors[1 + has_loads];
    if (head->kind == FRAME_ERROR || head->epoch != x->ask.epoch) return WRONG;
    if (head->layer != x->ask.layer || head->num_tensors != 1 + has_loads + is_promised)
        return WRONG;
    if (memcmp(head->request_id, &x->asked.id_low, 8)) return WRONG;
    if (memcmp(head->request_id + 8, &x->asked.id_high, 8)) return WRONG;
    if (part->code != x->ask.code || part->cols != columns_of(x)) return WRONG;
    if (part->rows && part->rows != x->asked.count) return WRONG;
    if (is_promised && (degraded->code != FRAME_INT8 || degraded->cols != 1 ||
                        degraded->rows != x->asked.count))
        return WRONG;
    if (!has_loads) return RIGHT;
    return loads->code == FRAME_INT64 && loads->rows == 1 && loads->cols == x->ask.num_workers
               ? RIGHT
               : WRONG;
}

static struct frame_head head_to(const struct exchange *x, int call, int kind, uint64_t digest) {
    struct frame_head head = {.kind = kind,
                              .num_tensors = 1 + (x->asked.basis_rows == 2) + (x->asked.promises != 0),
                              .layer = (int32_t)x->ask.layer,
                              .threshold = 1,
                              .took_ns = kind == FRAME_REQUEST ? 0 : (uint32_t)any(),
                              .epoch = x->ask.epoch,
                              .seq = x->asked.seq + (uint64_t)call,
                              .digest = digest};
    memcpy(head.request_id, &x->asked.id_low, 8);
    memcpy(head.request_id + 8, &x->asked.id_high, 8);
    head.tensors[0] = (struct tensor_place){(uint32_t)x->ask.code, (uint32_t)x->asked.count,
                                            (uint32_t)columns_of(x), 0};
    head.tensors[1] =
        (struct tensor_place){FRAME_INT64, 1, (uint32_t)x->ask.num_workers, 0};
    if (x->asked.promises)
        head.tensors[1 + (x->asked.basis_rows == 2)] =
            (struct tensor_place){FRAME_INT8, (uint32_t)x->asked.count, 1, 0};
    return head;
}

// A frame with such rows as are added up in it: numbers that are mostly plain.
static struct message frame_with_rows(const struct exchange *x, struct frame_head *head) {
    struct message m = frame_of(head);
    const int64_t rows = head->tensors[0].rows, hidden = x->ask.hidden;
    uint8_t *to = m.bytes + head->tensors[0].start;
    for (int64_t i = 0; i < rows * hidden && x->ask.code != FRAME_INT8; i++) {
        const float number = any_float();
        if (x->ask.code == FRAME_FLOAT32)
            memcpy(to + 4 * i, &number, 4);
        else
            memcpy(to + 2 * i, (const uint8_t *)&number + 2, 2);  // its upper half
    }
    for (int64_t row = 0; row < rows && x->ask.code == FRAME_INT8; row++) {
        const float scale = any_float();
        memcpy(to + row * (hidden + SCALE_BYTES) + hidden, &scale, 4);
    }
    frame_seal(m.bytes, head);
    return m;
}

static struct message error_to(const struct exchange *x, int call) {
    struct frame_head head = head_to(x, call, FRAME_ERROR, any());
    head.num_tensors = 0, head.body_size = below(100);
    return frame_of(&head);
}

// Almost right: another digest, shape or name.
static struct message almost(const struct exchange *x, int call, uint64_t digest) {
    struct frame_head head = head_to(x, call, FRAME_REPLY, digest);
    switch (below(10)) {
        case 0: head.digest ^= 1ull << below(64); break;
        case 1: head.epoch += (uint64_t)between(-1, 1); break;
        case 2: head.layer += (int32_t)between(-1, 1); break;
        case 3: head.seq += (uint64_t)between(-2, 2); break;
        case 4: head.request_id[below(16)] ^= 1; break;
        case 5: head.tensors[0].rows += (uint32_t)between(-1, 1); break;
        case 6: head.tensors[0].code = (uint32_t)between(FRAME_FLOAT32, FRAME_INT8); break;
        case 7: head.tensors[below(2)].cols += 1; break;
        case 8: head.tensors[between(1, 2)].rows += 1; break;
        default: head.num_tensors = (int)between(0, 3);
    }
    struct message m = frame_of(&head);
    if (one_in(2)) damage(&m);
    return m;
}

static void say(struct list *script, struct message m) {
    append(script, m);
    if (!one_in(4)) return;  // out of turn
    struct message *other = &script->all[below(script->num)];
    const struct message last = *other;
    *other = m, script->all[script->num - 1] = last;
}

static void write_script(const struct exchange *x, int call, uint64_t digest, int all_well) {
    struct list *script = &peers[x->peers[call]].script;
    const int goes_well = all_well || !one_in(6);
    struct frame_head right = head_to(x, call, FRAME_REPLY, digest);
    if (one_in(4)) right.tensors[0].rows = 0;
    while (one_in(3)) {
        struct frame_head other = any_head();
        other.seq &= ~(uint64_t)0 >> 1;
        say(script, frame_of(&other));
    }
    if (!goes_well && one_in(2)) {
        if (!one_in(4)) say(script, one_in(3) ? error_to(x, call) : almost(x, call, digest));
        if (one_in(4)) say(script, (struct message){0});
        if (one_in(2)) return;
    }
    struct message m = frame_with_rows(x, &right);
    if (!all_well && one_in(6)) say(script, copy_of(m.bytes, m.size));  // twice
    say(script, m);
    if (!all_well && one_in(6)) say(script, frame_with_rows(x, &right));  // again, and another one
}

static void make_request(const struct exchange *x, int call) {
    struct frame_head head = head_to(x, call, FRAME_REQUEST, 0);
    const struct asked *a = &x->asked;
    const struct promises *p = a->promises;
    head.num_tensors = 2, head.tensors[2] = (struct tensor_place){0};
    int32_t lowest = 10000;
    for (int64_t l = 0; p && l < p->num_levels; l++)
        if (p->thresholds[l] < lowest) lowest = p->thresholds[l];
    head.threshold = (float)(lowest / 10000.0);
    if (p) head.flags = FRAME_PROMISED, head.body_size = 4 + 8 * p->num_levels;
    if (p && p->num_levels > 1) head.body_size += a->count;
    head.tensors[1] =
        (struct tensor_place){FRAME_INT64, (uint32_t)a->basis_rows, (uint32_t)a->basis_size, 0};
    struct message m = frame_of(&head);
    uint8_t *to = m.bytes + head.tensors[0].start;
    if (x->ask.code == FRAME_INT8)
        pack_int8_rows(a->rows, a->count, x->ask.hidden, (int8_t *)to);
    else
        memcpy(to, a->rows, (size_t)(a->count * x->ask.hidden) * (x->ask.code == FRAME_FLOAT32 ? 4 : 2));
    memcpy(m.bytes + head.tensors[1].start, a->basis, (size_t)(a->basis_rows * a->basis_size) * 8);
    uint8_t *body = m.bytes + head.body_start;
    if (p) *(int32_t *)body = (int32_t)p->num_levels;
    for (int64_t l = 0; p && l < p->num_levels; l++) {
        memcpy(body + 4 + 8 * l, &p->thresholds[l], 4);
        memcpy(body + 8 + 8 * l, &p->phases[l], 4);
    }
    if (p && p->num_levels > 1) memcpy(body + 4 + 8 * p->num_levels, p->level_of_row, (size_t)a->count);
    frame_seal(m.bytes, &head);
    append(&peers[x->peers[call]].requests, m);
}

// Peers in any order; nodes one behind the other in the order of the sum.
static void choose_peers(struct exchange *x) {
    const int64_t num = x->ask.num = between(1, num_peers), first = below(num_peers);
    int64_t *order = own(x, exact(num * 8)), *node_of = own(x, exact(num * 8));
    void **channels = own(x, exact(num * 8));
    const int64_t shift = below(num);
    for (int64_t i = 0; i < num; i++) {
        x->peers[i] = (int)((first + i) % num_peers);
        channels[i] = peers[x->peers[i]].pair.sides[0];
        order[i] = one_in(2) ? -1 : (i + shift) % num;
        node_of[i] = i ? node_of[i - 1] + one_in(2) : 0;
    }
    for (int64_t i = 0; i < num; i++) order[i] = (i + shift) % num;
    x->ask.channels = channels, x->ask.order = order, x->ask.node_of = node_of;
}

static void promise(struct exchange *x) {
    struct asked *a = &x->asked;
    struct promises *p = own(x, exact(sizeof *p));
    const int64_t num_levels = between(1, 3);
    int32_t *numbers = own(x, exact(2 * num_levels * 4));
    uint8_t *level_of_row = own(x, exact(a->count));
    for (int64_t l = 0; l < num_levels; l++)
        numbers[l] = (int32_t)between(0, 10000), numbers[num_levels + l] = (int32_t)below(2);
    for (int64_t t = 0; t < a->count; t++) level_of_row[t] = (uint8_t)below(num_levels);
    *p = (struct promises){numbers, numbers + num_levels, num_levels > 1 ? level_of_row : 0, num_levels};
    a->promises = p;
    a->degraded = own(x, exact(a->count * 4));
    memset(a->degraded, 0, (size_t)a->count * 4);
}

// Memory of exactly as many numbers as travel, so that none behind them is read.
static const void *any_rows(int64_t code, int64_t count) {
    float *numbers = any_floats(count);
    if (code != FRAME_BFLOAT16) return numbers;
    uint16_t *halves = exact(count * 2);
    memcpy(halves, numbers, (size_t)count * 2);
    free(numbers);
    return halves;
}

void make_exchange(struct exchange *x, uint64_t seq) {
    static const int64_t codes[] = {FRAME_FLOAT32, FRAME_BFLOAT16, FRAME_INT8};
    const int64_t count = one_in(8) ? 64 : between(1, 6), hidden = between(1, 40);
    const int64_t workers = between(1, 4), basis_size = between(2, 5);
    *x = (struct exchange){
        .ask = {.num_workers = workers, .epoch = any(), .layer = (int32_t)any(), .hidden = hidden,
                .max_rows = 64, .max_cols = 4096, .max_bytes = one_in(8) ? 400 : 1 << 20,
                .code = codes[below(3)], .basis_size = basis_size},
        .asked = {.id_low = any(), .id_high = any(), .seq = seq | 1ull << CALLS_FROM,
                  .count = count, .basis_rows = between(1, 2), .basis_size = basis_size}};
    struct asked *a = &x->asked;
    choose_peers(x);
    void **others = own(x, exact(sizeof *others));
    others[0] = caller.sides[0], a->others = others, a->num_others = one_in(2);
    int64_t *basis = own(x, exact(a->basis_rows * basis_size * 8));
    scramble(basis, a->basis_rows * basis_size * 8);
    a->rows = own(x, (void *)any_rows(x->ask.code, count * hidden)), a->basis = x->ask.basis = basis;
    a->out = own(x, exact(count * hidden * 4));
    if (a->basis_rows == 2) a->loads = own(x, exact(workers * 8));
    if (x->ask.node_of[x->ask.num - 1]) a->node_sum = own(x, exact(count * hidden * 4));
    if (one_in(2)) promise(x);
    a->deadline_ns = clock_ns + (one_in(2) ? 1000 * 1000 * 1000 : between(1, 300) * 1000);
    const uint64_t digest = any();
    const int all_well = one_in(2);
    for (int call = 0; call < x->ask.num; call++) {
        make_request(x, call);
        write_script(x, call, digest, all_well);
    }
}

void free_exchange(struct exchange *x) {
    while (x->num_owned) free(x->owned[--x->num_owned]);
}
