// Frames of the tensor plane, as moesaic.transport.frame describes them.
#ifndef MOESAIC_FRAME_H
#define MOESAIC_FRAME_H

#include "calls.h"

enum { FRAME_HEADER = 128, FRAME_TENSORS = 4 };
enum frame_kind {
    FRAME_REQUEST = 1,
    FRAME_REPLY,
    FRAME_ERROR,
    FRAME_PING,
    FRAME_PONG,
    FRAME_NOTE,
    FRAME_HELLO = 16,
    FRAME_ACCEPT = 21
};
enum { FRAME_PROMISED = 4 };  // flag of a request, see moesaic.experts.frames
enum { FRAME_FLOAT32 = 1, FRAME_FLOAT16, FRAME_BFLOAT16, FRAME_INT32, FRAME_INT64, FRAME_INT8 };

struct tensor_place {
    uint32_t code, rows, cols;
    int64_t start;  // byte of the message
};

struct frame_head {
    int kind, num_tensors, flags;
    int32_t layer;
    float threshold;
    uint8_t request_id[16];
    uint64_t epoch, seq, digest;
    uint32_t took_ns;  // of a reply: what computing it took; 0: unknown
    int64_t nbytes;    // behind the header
    int64_t body_start, body_size;
    struct tensor_place tensors[FRAME_TENSORS];
};

struct frame_limits {
    int64_t max_rows, max_cols, max_bytes;
};

// Reads and checks a message as Frame.decode does; 0, or the number of the check that failed. No
// field is read twice, for another process could change it in between.
int frame_read(const uint8_t *message, int64_t size, const struct frame_limits *limits,
               struct frame_head *head);

// Finds the places of tensors of known code, rows and columns, and of a body of `body_size`.
void frame_lay_out(struct frame_head *head);

// Bytes of the message, once it is laid out.
int64_t frame_size(const struct frame_head *head);

// Writes the header and the padding around tensors and body that are in their places.
void frame_seal(uint8_t *message, const struct frame_head *head);

#endif
