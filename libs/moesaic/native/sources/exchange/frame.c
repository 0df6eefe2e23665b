#include "exchange/frame.h"

#include <string.h>

#include "exchange/xxh3.h"

enum { VERSION = 1, ALIGNED = 64 };

struct header {
    char magic[4];
    uint16_t version, header_len;
    uint8_t kind, num_tensors;
    uint16_t flags;
    int32_t layer;
    float threshold;
    uint32_t took_ns;
    uint8_t request_id[16];
    uint64_t epoch, seq, nbytes, digest;
    uint32_t table[3 * FRAME_TENSORS];
    uint64_t checksum;
};
_Static_assert(sizeof(struct header) == FRAME_HEADER, "the header has no holes");

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

static int64_t bytes_of(uint32_t code) {
    switch (code) {
        case FRAME_FLOAT32:
        case FRAME_INT32: return 4;
        case FRAME_FLOAT16:
        case FRAME_BFLOAT16: return 2;
        case FRAME_INT64: return 8;
        case FRAME_INT8: return 1;
        default: return 0;
    }
}

static uint64_t checksum_of_message(const struct header *header, const uint8_t *message,
                                    int64_t nbytes) {
    const uint64_t seed = xxh3_64(header, FRAME_HEADER - 8, 0);
    return xxh3_64(message + FRAME_HEADER, nbytes, seed);
}

static int is_kind(int kind) {
    return (kind >= FRAME_REQUEST && kind <= FRAME_NOTE) ||
           (kind >= FRAME_HELLO && kind <= FRAME_ACCEPT);
}

int frame_read(const uint8_t *message, int64_t size, const struct frame_limits *limits,
               struct frame_head *head) {
    struct header h;
    if (size < FRAME_HEADER) return 1;
    memcpy(&h, message, sizeof h);
    if (memcmp(h.magic, "MOES", 4)) return 2;
    if (h.version != VERSION) return 3;
    if (h.header_len != FRAME_HEADER) return 4;
    if (limits->max_bytes < FRAME_HEADER ||
        h.nbytes > (uint64_t)(limits->max_bytes - FRAME_HEADER))
        return 5;
    if (!is_kind(h.kind)) return 6;
    if (h.nbytes != (uint64_t)(size - FRAME_HEADER)) return 7;
    if (h.checksum != checksum_of_message(&h, message, size - FRAME_HEADER)) return 8;
    if (!(h.threshold >= 0 && h.threshold <= 1)) return 9;
    if (h.num_tensors > FRAME_TENSORS) return 10;
    *head = (struct frame_head){.kind = h.kind,
                                .num_tensors = h.num_tensors,
                                .flags = h.flags,
                                .layer = h.layer,
                                .threshold = h.threshold,
                                .took_ns = h.took_ns,
                                .epoch = h.epoch,
                                .seq = h.seq,
                                .digest = h.digest,
                                .nbytes = size - FRAME_HEADER};
    memcpy(head->request_id, h.request_id, sizeof h.request_id);
    int64_t start = FRAME_HEADER;
    for (int i = 0; i < h.num_tensors; i++) {
        const uint32_t code = h.table[3 * i], rows = h.table[3 * i + 1], cols = h.table[3 * i + 2];
        if (!bytes_of(code)) return 11;
        if (rows > limits->max_rows || cols > limits->max_cols) return 12;
        // Each is below 2^32, so the product is not; 2^61 of them are more than any message has.
        const uint64_t count = (uint64_t)rows * cols;
        if (count > (uint64_t)size) return 13;
        const int64_t end = start + (int64_t)count * bytes_of(code);
        if (end > size) return 13;
        head->tensors[i] = (struct tensor_place){code, rows, cols, start};
        start = aligned(end);
    }
    head->body_start = start < size ? start : size;
    head->body_size = size - head->body_start;
    return 0;
}

void frame_lay_out(struct frame_head *head) {
    int64_t start = FRAME_HEADER;
    for (int i = 0; i < head->num_tensors; i++) {
        struct tensor_place *t = &head->tensors[i];
        t->start = start;
        start = aligned(start + (int64_t)t->rows * t->cols * bytes_of(t->code));
    }
    head->body_start = start;
    head->nbytes = start + head->body_size - FRAME_HEADER;
}

int64_t frame_size(const struct frame_head *head) { return FRAME_HEADER + head->nbytes; }

void frame_seal(uint8_t *message, const struct frame_head *head) {
    struct header h = {.magic = {'M', 'O', 'E', 'S'},
                       .version = VERSION,
                       .header_len = FRAME_HEADER,
                       .kind = (uint8_t)head->kind,
                       .num_tensors = (uint8_t)head->num_tensors,
                       .flags = (uint16_t)head->flags,
                       .layer = head->layer,
                       .threshold = head->threshold,
                       .took_ns = head->took_ns,
                       .epoch = head->epoch,
                       .seq = head->seq,
                       .nbytes = (uint64_t)head->nbytes,
                       .digest = head->digest};
    memcpy(h.request_id, head->request_id, sizeof h.request_id);
    for (int i = 0; i < head->num_tensors; i++) {
        const struct tensor_place *t = &head->tensors[i];
        const uint32_t place[3] = {t->code, t->rows, t->cols};
        memcpy(h.table + (size_t)3 * (size_t)i, place, sizeof place);
        const int64_t end = t->start + (int64_t)t->rows * t->cols * bytes_of(t->code);
        memset(message + end, 0, (size_t)(aligned(end) - end));
    }
    h.checksum = checksum_of_message(&h, message, head->nbytes);
    memcpy(message, &h, sizeof h);
}
