// Parts of a scratch, one behind the other.
#ifndef MOESAIC_ARENA_H
#define MOESAIC_ARENA_H

#include "vector.h"

struct arena {
    uint8_t *next;
};

INLINE void *take(struct arena *arena, int64_t bytes) {
    void *taken = arena->next;
    arena->next += (bytes + 63) / 64 * 64;
    return taken;
}

#endif
