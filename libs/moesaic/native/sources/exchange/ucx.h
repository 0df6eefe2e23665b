// Channels over UCX: the same messages, by TCP or whatever else UCX has.
#ifndef MOESAIC_UCX_H
#define MOESAIC_UCX_H

#include "calls.h"

struct channel;
struct ucx_plane;

struct inbound {  // a message that has begun to come
    struct inbound *next;
    int done, failed, orphan;
    int64_t size;
    _Alignas(64) uint8_t bytes[];
};

struct ucx_end {
    struct ucx_plane *plane;
    void *endpoint;
    uint64_t send_tag, receive_tag;
    struct inbound *first, *last;
    uint8_t *room;         // of a message that is written now
    int linked;
    struct channel *next;  // of the same plane
};

// The same as of channels. `ucx_sleep`: false if there is something to do.
const uint8_t *ucx_peek(struct channel *c, int64_t *size);
void ucx_release(struct channel *c);
uint8_t *ucx_room(struct channel *c, int64_t size);
void ucx_commit(struct channel *c, int64_t size);
int ucx_progress(struct channel *c);
int ucx_is_ready(const struct channel *c);
int ucx_sleep(struct channel *c);
void ucx_end(struct channel *c);

// What becomes readable when UCX has something to do.
int ucx_descriptor(const struct channel *c);

#endif
