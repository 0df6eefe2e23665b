// Channels, and those between two processes of one host: two rings of bytes in memory that both map, and a bell
// (an eventfd) each, which is rung only for a side that sleeps.
//   Records  64 bytes of head, then a part of a message, padded to 64 bytes. A message that fits is
//            one part, and so lies in one piece; longer ones come in several.
//   Trust    the other side has proved the cluster secret. Damage in its counters ends the channel:
//            no read or write ever leaves the memory.
#ifndef MOESAIC_RING_H
#define MOESAIC_RING_H

#include <stdatomic.h>

#include "calls.h"
#include "exchange/carrier.h"

enum { RECORD = 64 };  // bytes of a record's head, and its alignment

struct ring {  // in shared memory; counters only grow
    _Alignas(64) _Atomic uint64_t written;
    _Alignas(64) _Atomic uint64_t read;
    _Alignas(64) _Atomic uint32_t reader_sleeps;
    _Atomic uint32_t writer_sleeps;  // until there is room
    _Atomic uint32_t reader_core;    // on which it went to sleep, and 1; 0: unknown
    uint8_t pad[52];
};

struct waiting {  // a message behind others that the ring has no room for
    struct waiting *next;
    int64_t size, sent;
    uint8_t bytes[];
};

struct kept {  // a message that came while another one was awaited
    struct kept *next;
    int64_t size;
    _Alignas(64) uint8_t bytes[];
};

struct channel {
    const struct carrier *carrier;  // or none: rings
    struct ucx_end *ucx;
    struct stream *stream;
    struct ring *in, *out;
    uint8_t *in_bytes, *out_bytes;
    uint64_t capacity;
    // This side's own counters: the other side can write to those in shared memory.
    uint64_t wrote, next;
    uint64_t peeked;  // bytes of the record that is read
    int64_t most;     // bytes of a message
    int64_t excess;   // bytes of a longer one, which has broken the channel
    int bell;       // the other side's
    int control;    // the connection whose end is the peer's
    int broken;
    struct waiting *first, *last;
    struct kept *kept;
    int64_t outstanding;  // exchanges whose replies are awaited without Python
    int comes_last;       // of the replies to one batch, the last time
    int takes_kept;
    uint8_t *assembled;  // a message of several parts
    int64_t assembled_size, assembled_got;
    struct answers *answers;  // or none: every message is Python's
};

// The next message in one piece, or none yet; it stays until `channel_release`.
const uint8_t *channel_peek(struct channel *c, int64_t *size);
void channel_release(struct channel *c);

// Room for a message in one piece, or none now. `channel_commit` sends it. Or `channel_put` does, and
// `channel_tell` wakes a peer that sleeps: whoever is woken may take this core at once.
uint8_t *channel_room(struct channel *c, int64_t size);
void channel_commit(struct channel *c, int64_t size);
void channel_put(struct channel *c, int64_t size);
void channel_tell(struct channel *c);

// The core on which the peer went to sleep, and 1; 0: unknown. A peer that is woken there takes it from
// whoever runs on it.
uint32_t channel_core(const struct channel *c);
uint32_t this_core(void);

// Reads the bell, so that it is quiet until it is rung again.
void quiet(int bell);

// Copies of messages, kept in the order in which they came.
void channel_keep(struct channel *c, const uint8_t *message, int64_t size);

// Sends what waits as far as there is room; true if something moved.
int channel_pump(struct channel *c);

// True if there is something to read, or room for what waits.
int channel_is_ready(struct channel *c);

// Begins the next turn of a loop that looks at channels. UCX is asked once a turn, for all of them.
void channel_turn(void);
uint64_t this_turn(void);

int64_t now_ns(void);

#endif
