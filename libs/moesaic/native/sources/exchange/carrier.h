// What carries the messages of a channel that is not a ring. The calls are those of `channel_*` for
// channels of this kind, on the thread of the channel's event loop.
#ifndef MOESAIC_CARRIER_H
#define MOESAIC_CARRIER_H

#include "calls.h"

struct channel;

struct carrier {
    const uint8_t *(*peek)(struct channel *c, int64_t *size);
    void (*release)(struct channel *c);
    uint8_t *(*room)(struct channel *c, int64_t size);
    void (*commit)(struct channel *c, int64_t size);
    int (*pump)(struct channel *c);
    int (*is_ready)(const struct channel *c);
    int (*sleep)(struct channel *c);  // false if there is something to do
    // What becomes readable when there is something to do.
    int (*descriptor)(const struct channel *c);
    void (*end)(struct channel *c);
};

#endif
