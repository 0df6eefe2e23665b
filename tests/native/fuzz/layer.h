// A small layer of experts that one worker answers for, and the answers that it owes.
#ifndef MOESAIC_FUZZ_LAYER_H
#define MOESAIC_FUZZ_LAYER_H

#include "fuzz.h"

enum { MOST_WORKERS = 3, MOST_OWN = 8, MOST_EXPERTS = 12 };  // the gate's, and with united ones

struct layer_here {
    struct answerable is;
    int32_t replicas[MOST_EXPERTS * MOST_WORKERS];
    struct expert experts[MOST_EXPERTS];
    const struct expert *slots[MOST_EXPERTS];
    void *owned[128];  // memory that all these point to
    int num_owned;
};

void make_layer(struct layer_here *layer, uint64_t epoch, int64_t index);
void free_layer(struct layer_here *layer);

// A request that the layer is to answer, with rows of chance; `loads`: the basis has them; `promised`: so
// have the rows something, now and then in another form.
struct message request_for(const struct layer_here *layer, int64_t rows, int in_bytes, int loads,
                           int promised);

// True if Python would have answered it with a plain sum for the rows of this layer.
int is_request_for(const struct layer_here *layer, const uint8_t *message,
                   const struct frame_head *head);

// The answer, to the bit; computed by the same kernels, called one by one.
struct message reply_of(const struct layer_here *layer, const uint8_t *message,
                        const struct frame_head *request, int threads);

#endif
