// Channels over UCX: the same messages, by RDMA or whatever else UCX has.
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

#endif
