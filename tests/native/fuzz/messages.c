// Frames: made, damaged, and read plainly. The places of fields are those of moesaic.transport.frame.
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { TOOK_AT = 20, NBYTES_AT = 56, TABLE_AT = 72, CHECKSUM_AT = 120, ALIGNED = 64 };

static const int64_t BYTES_OF[] = {0, 4, 2, 2, 4, 8, 1};  // by code

struct message copy_of(const uint8_t *bytes, int64_t size) {
    return (struct message){exact_copy(bytes, size), size};
}

int same(struct message a, const uint8_t *bytes, int64_t size) {
    return a.size == size && !memcmp(a.bytes, bytes, (size_t)size);
}

struct frame_head any_head(void) {
    struct frame_head head = {.kind = (int)between(FRAME_REQUEST, FRAME_NOTE),
                              .num_tensors = (int)between(0, FRAME_TENSORS),
                              .flags = one_in(2) ? 0 : (int)below(1 << 16),
                              .layer = (int32_t)any(),
                              .threshold = (float)below(5) / 4,
                              .took_ns = (uint32_t)any(),
                              .epoch = any(),
                              .seq = any(),
                              .digest = any(),
                              .body_size = one_in(2) ? 0 : below(200)};
    if (one_in(8)) head.kind = (int)between(FRAME_HELLO, FRAME_ACCEPT);
    scramble(head.request_id, sizeof head.request_id);
    for (int i = 0; i < head.num_tensors; i++)
        head.tensors[i] =
            (struct tensor_place){(uint32_t)between(FRAME_FLOAT32, FRAME_INT8), (uint32_t)below(8),
                                  (uint32_t)(one_in(8) ? below(300) : below(20)), 0};
    return head;
}

struct message frame_of(struct frame_head *head) {
    frame_lay_out(head);
    struct message m = {exact(frame_size(head)), frame_size(head)};
    scramble(m.bytes, m.size);
    frame_seal(m.bytes, head);
    return m;
}

static uint64_t number_at(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

static uint64_t plain_checksum(const uint8_t *message, int64_t size) {
    const uint64_t seed = checksum_of(message, CHECKSUM_AT, 0);
    return checksum_of(message + FRAME_HEADER, size - FRAME_HEADER, seed);
}

void reseal(struct message *m) {
    if (m->size < FRAME_HEADER) return;
    const uint64_t nbytes = (uint64_t)(m->size - FRAME_HEADER);
    if (!one_in(16)) memcpy(m->bytes + NBYTES_AT, &nbytes, 8);
    const uint64_t checksum = plain_checksum(m->bytes, m->size);
    memcpy(m->bytes + CHECKSUM_AT, &checksum, 8);
}

static void resize(struct message *m, int64_t size) {
    struct message other = {exact(size), size};
    scramble(other.bytes, size);
    memcpy(other.bytes, m->bytes, (size_t)(size < m->size ? size : m->size));
    free(m->bytes);
    *m = other;
}

static void flip_bits(struct message *m) {
    for (int64_t n = between(1, 4); n--;) m->bytes[below(m->size)] ^= (uint8_t)(1 << below(8));
}

// Another value in one of the fields.
static void set_field(struct message *m) {
    static const struct {
        int at, bytes;
    } fields[] = {{0, 4},  {4, 2},  {6, 2},  {8, 1},  {9, 1},  {10, 2}, {12, 4},
                  {16, 4}, {20, 4}, {24, 8}, {40, 8}, {48, 8}, {56, 8}, {64, 8}};
    const int place = (int)below(FRAME_TENSORS * 3 + 14);
    const int at = place < 14 ? fields[place].at : TABLE_AT + 4 * (place - 14);
    const int bytes = place < 14 ? fields[place].bytes : 4;
    const uint64_t before = m->size < FRAME_HEADER ? 0 : number_at(m->bytes + at, bytes);
    const uint64_t value = one_in(2)   ? edge()
                           : one_in(2) ? (uint64_t)below(24)
                                       : before + (uint64_t)between(-2, 2);
    if (m->size >= FRAME_HEADER) memcpy(m->bytes + at, &value, (size_t)bytes);
}

// More numbers than there are bytes, in all ways in which a product may run over.
static void set_shape(struct message *m) {
    const int64_t bits = between(28, 32);
    const uint32_t shape[2] = {(uint32_t)(1ull << bits) - (uint32_t)one_in(2),
                               (uint32_t)(1ull << between(59 - bits, 32)) - (uint32_t)one_in(2)};
    if (m->size < FRAME_HEADER) return;
    memcpy(m->bytes + TABLE_AT + 12 * below(FRAME_TENSORS) + 4, shape, sizeof shape);
}

void damage(struct message *m) {
    for (int64_t times = one_in(4) ? 2 : 1; times--;) {
        const int64_t how = below(9);
        if (how == 8) set_shape(m);
        if (how == 0 && m->size > 1) resize(m, below(m->size));
        if (how == 1) resize(m, m->size + between(1, 200));
        if (how == 2 && m->size) flip_bits(m);
        if (how == 3 && m->size > FRAME_HEADER) resize(m, between(FRAME_HEADER, m->size));
        if (how > 3 && how < 8) set_field(m);
    }
    if (!one_in(4)) reseal(m);
}

int read_plainly(const uint8_t *m, int64_t size, const struct frame_limits *limits,
                 struct frame_head *head) {
    if (size < FRAME_HEADER || memcmp(m, "MOES", 4)) return 0;
    if (number_at(m + 4, 2) != 1 || number_at(m + 6, 2) != FRAME_HEADER) return 0;
    const uint64_t nbytes = number_at(m + NBYTES_AT, 8);
    if ((__int128)nbytes + FRAME_HEADER > limits->max_bytes) return 0;
    if (nbytes != (uint64_t)(size - FRAME_HEADER)) return 0;
    if (number_at(m + CHECKSUM_AT, 8) != plain_checksum(m, size)) return 0;
    *head = (struct frame_head){.kind = m[8],
                                .num_tensors = m[9],
                                .flags = (int)number_at(m + 10, 2),
                                .layer = (int32_t)number_at(m + 12, 4),
                                .took_ns = (uint32_t)number_at(m + TOOK_AT, 4),
                                .epoch = number_at(m + 40, 8),
                                .seq = number_at(m + 48, 8),
                                .nbytes = (int64_t)nbytes,
                                .digest = number_at(m + 64, 8)};
    memcpy(&head->threshold, m + 16, 4);
    memcpy(head->request_id, m + 24, 16);
    const int is_kind = (m[8] >= 1 && m[8] <= 6) || (m[8] >= 16 && m[8] <= 21);
    if (!is_kind || !(head->threshold >= 0 && head->threshold <= 1) || m[9] > 4) return 0;
    __int128 start = FRAME_HEADER;
    for (int i = 0; i < head->num_tensors; i++) {
        uint32_t table[3];
        memcpy(table, m + TABLE_AT + 12 * i, sizeof table);
        if (table[0] < 1 || table[0] > 6) return 0;
        if (table[1] > limits->max_rows || table[2] > limits->max_cols) return 0;
        const __int128 end = start + (__int128)table[1] * table[2] * BYTES_OF[table[0]];
        if (end > size) return 0;
        head->tensors[i] = (struct tensor_place){table[0], table[1], table[2], (int64_t)start};
        start = (end + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    head->body_start = start < size ? (int64_t)start : size;
    head->body_size = size - head->body_start;
    return 1;
}
