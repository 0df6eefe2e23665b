#define _GNU_SOURCE
#include "exchange/ring.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "exchange/frame.h"

enum { SKIP = 1 };  // flag of a record: the rest of the ring is empty
enum { KIND_AT = 8, SEQ_AT = 48 };  // of a frame

struct record {
    uint64_t size;  // of the message
    uint64_t part;  // bytes of it in this record
    uint64_t flags;
};

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static _Thread_local uint64_t turns;  // a process may have several loops

void channel_turn(void) { turns++; }

uint64_t this_turn(void) { return turns; }

static uint64_t padded(uint64_t bytes) { return (bytes + RECORD - 1) / RECORD * RECORD; }

EXPORT int64_t channel_bytes(int64_t capacity) {
    return 2 * (int64_t)sizeof(struct ring) + 2 * capacity;
}

EXPORT void *channel_open(uint8_t *memory, int64_t capacity, int side, int bell, int control,
                          int64_t most) {
    struct channel *c = calloc(1, sizeof *c);
    if (!c) return 0;
    struct ring *rings = (struct ring *)memory;
    uint8_t *bytes = memory + 2 * sizeof(struct ring);
    c->out = rings + side, c->in = rings + !side;
    c->out_bytes = bytes + side * capacity, c->in_bytes = bytes + !side * capacity;
    c->capacity = (uint64_t)capacity;
    c->bell = bell, c->control = control, c->most = most;
    // Until its loop looks at it, a side counts as asleep.
    atomic_store(&c->in->reader_sleeps, 1);
    atomic_store(&c->out->writer_sleeps, 1);
    return c;
}

EXPORT void channel_close(void *channel) {
    struct channel *c = channel;
    if (c->carrier) c->carrier->end(c);
    for (struct waiting *w = c->first, *next; w; w = next) next = w->next, free(w);
    for (struct kept *k = c->kept, *next; k; k = next) next = k->next, free(k);
    free(c->assembled);
    free(c);
}

static void ring_bell(struct channel *c) {
    const uint64_t one = 1;
    // It cannot fail but where it is full, which is as good.
    if (write(c->bell, &one, sizeof one) < 0) return;
}

void quiet(int bell) {
    uint64_t rung;
    if (read(bell, &rung, sizeof rung) < 0) return;  // it was not rung
}

// Bytes that can be written; 0 also if the other side's counter makes no sense.
static uint64_t room_in(struct channel *c) {
    const uint64_t used = c->wrote - atomic_load_explicit(&c->out->read, memory_order_acquire);
    if (used > c->capacity) {
        c->broken = 1;
        return 0;
    }
    return c->capacity - used;
}

// Moves on by a record that is written, without telling a side that sleeps.
static void move_on(struct channel *c, uint64_t bytes) {
    c->wrote += bytes;
    atomic_store(&c->out->written, c->wrote);
}

// Where the next record goes, `bytes` long with its head: an empty ring begins anew, for its first
// lines are still in the cache.
static uint8_t *place_for(struct channel *c, uint64_t bytes) {
    const uint64_t room = room_in(c), at = c->wrote % c->capacity, to_end = c->capacity - at;
    const int anew = at && room == c->capacity && to_end + bytes <= room;
    if (bytes <= to_end && !anew) return bytes <= room ? c->out_bytes + at : 0;
    if (to_end + bytes > room) return 0;
    *(struct record *)(c->out_bytes + at) = (struct record){.flags = SKIP};
    move_on(c, to_end);
    return c->out_bytes;
}

void channel_tell(struct channel *c) {
    if (c->carrier) return;
    if (atomic_load(&c->out->reader_sleeps) && atomic_exchange(&c->out->reader_sleeps, 0))
        ring_bell(c);
}

uint32_t channel_core(const struct channel *c) {
    return c->carrier ? 0 : atomic_load_explicit(&c->out->reader_core, memory_order_relaxed);
}

uint32_t this_core(void) { return (uint32_t)(sched_getcpu() + 1); }

static void publish(struct channel *c, uint64_t bytes) {
    move_on(c, bytes);
    channel_tell(c);
}

uint8_t *channel_room(struct channel *c, int64_t size) {
    if (c->carrier) return c->broken ? 0 : c->carrier->room(c, size);
    if (c->first || c->broken || RECORD + padded((uint64_t)size) > c->capacity / 2) return 0;
    uint8_t *place = place_for(c, RECORD + padded((uint64_t)size));
    if (!place) return 0;
    *(struct record *)place = (struct record){(uint64_t)size, (uint64_t)size, 0};
    return place + RECORD;
}

void channel_put(struct channel *c, int64_t size) {
    if (c->carrier)
        c->carrier->commit(c, size);
    else
        move_on(c, RECORD + padded((uint64_t)size));
}

void channel_commit(struct channel *c, int64_t size) {
    channel_put(c, size);
    channel_tell(c);
}

// Bytes of the first message that waits which are sent next.
static uint64_t next_part(const struct channel *c) {
    const uint64_t left = (uint64_t)(c->first->size - c->first->sent);
    const uint64_t most = c->capacity / 4 - RECORD;
    return left < most ? left : most;
}

int channel_pump(struct channel *c) {
    int moved = 0;
    if (c->carrier) return c->carrier->pump(c);
    while (c->first && !c->broken) {
        struct waiting *w = c->first;
        const uint64_t part = next_part(c);
        uint8_t *place = place_for(c, RECORD + padded(part));
        if (!place) return moved;
        *(struct record *)place = (struct record){(uint64_t)w->size, part, 0};
        memcpy(place + RECORD, w->bytes + w->sent, part);
        publish(c, RECORD + padded(part));
        w->sent += (int64_t)part;
        moved = 1;
        if (w->sent < w->size) continue;
        c->first = w->next;
        if (!c->first) c->last = 0;
        free(w);
    }
    return moved;
}

EXPORT void channel_answer(void *channel, void *answers) {
    ((struct channel *)channel)->answers = answers;
}

EXPORT int channel_send(void *channel, const uint8_t *message, int64_t size) {
    struct channel *c = channel;
    if (c->broken) return -1;
    uint8_t *place = channel_room(c, size);
    if (place) {
        memcpy(place, message, (size_t)size);
        channel_commit(c, size);
        return 0;
    }
    if (c->carrier) return -1;
    struct waiting *w = malloc(sizeof *w + (size_t)size);
    if (!w) return -1;
    *w = (struct waiting){.size = size};
    memcpy(w->bytes, message, (size_t)size);
    if (c->last)
        c->last->next = w;
    else
        c->first = w;
    c->last = w;
    channel_pump(c);
    if (c->first && !c->broken) {
        // Whoever sent it may sleep without a look at this channel: the reader has to ring for room.
        atomic_store(&c->out->writer_sleeps, 1);
        atomic_thread_fence(memory_order_seq_cst);
        channel_pump(c);
    }
    return c->broken ? -1 : 0;
}

static void advance(struct channel *c, uint64_t bytes) {
    c->next += bytes;
    atomic_store(&c->in->read, c->next);
    if (atomic_load(&c->in->writer_sleeps) && atomic_exchange(&c->in->writer_sleeps, 0))
        ring_bell(c);
}

// The head of the next record, checked; none if there is none.
static int next_record(struct channel *c, struct record *head) {
    for (;;) {
        const uint64_t written = atomic_load_explicit(&c->in->written, memory_order_acquire);
        const uint64_t there = written - c->next, at = c->next % c->capacity;
        if (!there || c->broken) return 0;
        // Copied: the other side could change it after the check.
        memcpy(head, c->in_bytes + at, sizeof *head);
        const uint64_t to_end = c->capacity - at;
        if (there > c->capacity || there % RECORD) break;
        if (head->flags == SKIP) {
            if (there < to_end) break;
            advance(c, to_end);
            continue;
        }
        if (head->flags || !head->part || head->part > head->size || head->part > to_end ||
            RECORD + padded(head->part) > (there < to_end ? there : to_end))
            break;
        return 1;
    }
    c->broken = 1;
    return 0;
}

const uint8_t *channel_peek(struct channel *c, int64_t *size) {
    struct record head;
    if (c->carrier) return c->carrier->peek(c, size);
    if (c->assembled && c->assembled_got == c->assembled_size) {
        *size = c->assembled_size;
        return c->assembled;
    }
    while (next_record(c, &head)) {
        const uint8_t *part = c->in_bytes + c->next % c->capacity + RECORD;
        if (head.size > (uint64_t)c->most) {
            c->broken = 1, c->excess = (int64_t)(head.size & INT64_MAX);
            return 0;
        }
        if (!c->assembled && head.part == head.size) {
            c->peeked = RECORD + padded(head.part);
            *size = (int64_t)head.size;
            return part;
        }
        if (!c->assembled) {
            if (!(c->assembled = aligned_alloc(RECORD, padded(head.size)))) {
                c->broken = 1;
                return 0;
            }
            c->assembled_size = (int64_t)head.size, c->assembled_got = 0;
        }
        if (head.size != (uint64_t)c->assembled_size ||
            head.part > (uint64_t)(c->assembled_size - c->assembled_got)) {
            c->broken = 1;
            return 0;
        }
        memcpy(c->assembled + c->assembled_got, part, head.part);
        c->assembled_got += (int64_t)head.part;
        advance(c, RECORD + padded(head.part));
        if (c->assembled_got == c->assembled_size) {
            *size = c->assembled_size;
            return c->assembled;
        }
    }
    return 0;
}

void channel_release(struct channel *c) {
    if (c->carrier) {
        c->carrier->release(c);
        return;
    }
    if (c->assembled) {
        free(c->assembled);
        c->assembled = 0;
        return;
    }
    const uint64_t bytes = c->peeked;
    c->peeked = 0;
    advance(c, bytes);
}

void channel_keep(struct channel *c, const uint8_t *message, int64_t size) {
    struct kept *k = aligned_alloc(64, (sizeof *k + (size_t)size + 63) / 64 * 64);
    if (!k) {
        c->broken = 1;
        return;
    }
    k->next = 0, k->size = size;
    memcpy(k->bytes, message, (size_t)size);
    struct kept **last = &c->kept;
    while (*last) last = &(*last)->next;
    *last = k;
}

int channel_is_ready(struct channel *c) {
    if (c->broken || (c->kept && !c->outstanding)) return 1;
    if (c->carrier) return c->carrier->is_ready(c);
    if (atomic_load(&c->in->written) != c->next) return 1;
    if (!c->first) return 0;
    // Whoever wrongly says yes here keeps its side awake until the reader moves on.
    const uint64_t bytes = RECORD + padded(next_part(c)), room = room_in(c);
    const uint64_t to_end = c->capacity - c->wrote % c->capacity;
    return c->broken || room >= bytes + (bytes > to_end ? to_end : 0);
}

// True for an answer to a call from `NATIVE_SEQ` on: whoever awaits it finds it among those kept.
static int is_awaited(const struct channel *c, const uint8_t *message, int64_t size) {
    uint64_t seq;
    if (!c->outstanding || size < FRAME_HEADER) return 0;
    memcpy(&seq, message + SEQ_AT, sizeof seq);
    return (message[KIND_AT] == FRAME_REPLY || message[KIND_AT] == FRAME_ERROR) && seq >> 63;
}

EXPORT int64_t channel_take(void *channel, uint8_t **message) {
    struct channel *c = channel;
    int64_t size = 0;
    const uint8_t *found;
    channel_pump(c);
    if (!c->outstanding && c->kept) {
        c->takes_kept = 1;
        *message = c->kept->bytes;
        return c->kept->size;
    }
    while ((found = channel_peek(c, &size))) {
        if (!is_awaited(c, found, size)) {
            *message = (uint8_t *)found;
            return size;
        }
        channel_keep(c, found, size);
        channel_release(c);
    }
    return c->broken ? -1 : 0;
}

EXPORT void channel_taken(void *channel) {
    struct channel *c = channel;
    if (c->takes_kept)
        channel_forget(c);
    else
        channel_release(c);
    c->takes_kept = 0;
}

EXPORT int channel_sleep(void *channel) {
    struct channel *c = channel;
    if (c->carrier) return !channel_is_ready(c) && c->carrier->sleep(c);
    atomic_store_explicit(&c->in->reader_core, this_core(), memory_order_relaxed);
    atomic_store(&c->in->reader_sleeps, 1);
    atomic_store(&c->out->writer_sleeps, c->first != 0);
    atomic_thread_fence(memory_order_seq_cst);
    return !channel_is_ready(c);
}

EXPORT int64_t channel_kept(void *channel, uint8_t **message) {
    struct kept *k = ((struct channel *)channel)->kept;
    if (!k) return 0;
    *message = k->bytes;
    return k->size;
}

EXPORT void channel_forget(void *channel) {
    struct channel *c = channel;
    struct kept *k = c->kept;
    c->kept = k->next;
    free(k);
}

EXPORT void channel_hold(void *channel, const uint8_t *message, int64_t size) {
    channel_keep(channel, message, size);
}

EXPORT int64_t channel_outstanding(void *channel) {
    return ((struct channel *)channel)->outstanding;
}

EXPORT int64_t channel_excess(void *channel) { return ((struct channel *)channel)->excess; }

EXPORT void channel_break(void *channel) { ((struct channel *)channel)->broken = 1; }
