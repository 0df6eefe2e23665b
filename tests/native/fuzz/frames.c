// Frames that were damaged on their way: taken or refused as by a plain reader, field by field.
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

static const int64_t BYTES_OF[] = {0, 4, 2, 2, 4, 8, 1};  // by code

static struct frame_limits any_limits(void) {
    struct frame_limits limits = {16, 4096, 1 << 20};
    if (one_in(4)) limits.max_rows = below(8);
    if (one_in(4)) limits.max_cols = below(40);
    if (one_in(4)) limits.max_bytes = below(1000);
    if (one_in(8)) limits = (struct frame_limits){UINT32_MAX, UINT32_MAX, INT64_MAX};
    return limits;
}

static void check_bounds(const struct frame_head *head, int64_t size,
                         const struct frame_limits *limits) {
    int64_t behind = FRAME_HEADER;
    CHECK(size <= limits->max_bytes && head->nbytes == size - FRAME_HEADER);
    CHECK(head->num_tensors >= 0 && head->num_tensors <= FRAME_TENSORS);
    for (int i = 0; i < head->num_tensors; i++) {
        const struct tensor_place *t = &head->tensors[i];
        CHECK(t->rows <= limits->max_rows && t->cols <= limits->max_cols);
        CHECK(t->start >= behind && t->start % 64 == 0);
        behind = t->start + (int64_t)t->rows * t->cols * BYTES_OF[t->code];
        CHECK(behind <= size);
    }
    CHECK(head->body_start >= behind && head->body_size >= 0);
    CHECK(head->body_start + head->body_size == size);
}

// Equal but for the holes of the struct, and for tensors that are not there.
static void check_equal(const struct frame_head *a, const struct frame_head *b) {
    CHECK(a->kind == b->kind && a->num_tensors == b->num_tensors && a->flags == b->flags);
    CHECK(a->layer == b->layer && a->threshold == b->threshold && a->epoch == b->epoch);
    CHECK(a->took_ns == b->took_ns && a->seq == b->seq && a->digest == b->digest);
    CHECK(a->nbytes == b->nbytes);
    CHECK(a->body_start == b->body_start && a->body_size == b->body_size);
    CHECK(!memcmp(a->request_id, b->request_id, sizeof a->request_id));
    for (int i = 0; i < a->num_tensors; i++) {
        const struct tensor_place *x = &a->tensors[i], *y = &b->tensors[i];
        CHECK(x->code == y->code && x->rows == y->rows && x->cols == y->cols);
        CHECK(x->start == y->start);
    }
}

static int check_read(struct message m, const struct frame_limits *limits) {
    struct frame_head head, plain;
    const int taken = !frame_read(m.bytes, m.size, limits, &head);
    CHECK(taken == read_plainly(m.bytes, m.size, limits, &plain));
    if (!taken) return 0;
    check_bounds(&head, m.size, limits);
    check_equal(&head, &plain);
    return 1;
}

void fuzz_frames(void) {
    for (int n = 0; n < 40; n++) {
        struct frame_head head = any_head();
        struct message m = frame_of(&head);
        struct frame_limits limits = {512, 512, 1 << 20};
        CHECK(check_read(m, &limits));
        limits = any_limits();
        check_read(m, &limits);
        damage(&m);
        check_read(m, &limits);
        free(m.bytes);
    }
}
