// A peer that writes anywhere in the shared memory at any moment: the other side reads and writes where it
// may, takes messages or finds the channel broken, and comes back.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

static struct pair pair;
static atomic_int storming;

static struct channel *victim(void) { return pair.sides[0]; }

static uint64_t near(uint64_t count) {
    switch (below(4)) {
        case 0: return count + (uint64_t)between(-3, 3) * 64;
        case 1: return count + (uint64_t)between(-(int64_t)sizeof(struct ring), pair.capacity + 64);
        case 2: return count + edge();
        default: return edge();
    }
}

// Numbers as a record begins with: bytes of the message, bytes of the part, flags.
static void forge_record(const struct channel *c, uint8_t *at, uint64_t to_end) {
    uint64_t part = one_in(2) ? (uint64_t)below(pair.capacity) : to_end - (uint64_t)below(200);
    if (one_in(4)) part = edge();
    const uint64_t more = one_in(2) ? 0 : one_in(2) ? (uint64_t)below(5000) : edge();
    const uint64_t size = one_in(3) ? (uint64_t)c->assembled_size : part + more;
    const uint64_t record[3] = {size, part, one_in(3) ? edge() : (uint64_t)one_in(3)};
    memcpy(at, record, sizeof record);
}

// One of the things that the peer can do at any time: these bytes are its own.
static void meddle(struct ring *in, struct ring *out, const struct channel *c) {
    const uint64_t next = atomic_load_explicit(&in->read, memory_order_relaxed);
    const uint64_t wrote = atomic_load_explicit(&out->written, memory_order_relaxed);
    const uint64_t capacity = (uint64_t)pair.capacity, at = next / 64 * 64 % capacity;
    switch (below(8)) {
        case 0: atomic_store(&in->written, near(next)); break;
        case 1: atomic_store(&out->read, near(one_in(2) ? wrote : wrote - capacity)); break;
        case 2: atomic_store(&in->written, next + 64 * (uint64_t)below(pair.capacity / 64)); break;
        case 3: forge_record(c, c->in_bytes + at, capacity - at); break;
        case 4: forge_record(c, c->in_bytes + below(pair.capacity / 64) * 64, capacity); break;
        case 5: scramble(c->in_bytes + below(pair.capacity - 64), between(1, 64)); break;
        case 6: atomic_store(&out->reader_core, (uint32_t)edge()); break;
        default:
            atomic_store(&in->writer_sleeps, (uint32_t)edge());
            atomic_store(&out->reader_sleeps, (uint32_t)edge());
    }
}

// Checks the place of a message that was taken, and reads every byte of it.
static void look_through(const struct channel *c, const uint8_t *message, int64_t size) {
    const int in_ring = message >= c->in_bytes && message + size <= c->in_bytes + c->capacity;
    uint8_t sum = 0;
    CHECK(size > 0 && (in_ring || (message == c->assembled && size == c->assembled_size) ||
                       (c->kept && message == c->kept->bytes)));
    for (int64_t i = 0; i < size; i++) sum += message[i];
    CHECK(!sum || sum);  // it is needed
}

static void take_some(struct channel *c, void (*between_looks)(void)) {
    uint8_t *message;
    for (int64_t most = between(1, 6); most--;) {
        const int64_t size = channel_take(c, &message);
        CHECK(size > 0 || size == -c->broken);
        if (size <= 0) return;
        if (between_looks) between_looks();
        look_through(c, message, size);
        if (one_in(8)) channel_keep(c, message, size);
        channel_taken(c);
    }
}

static void send_some(struct channel *c) {
    const int64_t size = one_in(4) ? between(1, 3 * pair.capacity) : between(1, 400);
    struct message m = {exact(size), size};
    scramble(m.bytes, size);
    uint8_t *room = one_in(2) ? channel_room(c, size) : 0;
    if (room) {
        CHECK(room >= c->out_bytes && room + size <= c->out_bytes + c->capacity);
        memcpy(room, m.bytes, (size_t)size);
        channel_commit(c, size);
    } else {
        const int sent = channel_send(c, m.bytes, size);
        CHECK(sent == -c->broken);
    }
    free(m.bytes);
}

static void act(struct channel *c, void (*between_looks)(void)) {
    uint8_t *message;
    switch (below(6)) {
        case 0:
        case 1: take_some(c, between_looks); break;
        case 2: send_some(c); break;
        case 3:
            if (channel_sleep(c)) CHECK(!c->broken);
            break;
        case 4: c->outstanding = one_in(2); break;
        default:
            if (channel_kept(c, &message)) channel_forget(c);
    }
}

static void meddle_now(void) {
    if (one_in(2)) meddle(victim()->in, victim()->out, victim());
}

// One side acts, and leaves the bytes of the other as they were.
static void act_in_bounds(void) {
    struct channel *c = victim();
    struct ring *in = c->in;
    uint8_t *before = exact_copy(c->in_bytes, pair.capacity);
    const uint64_t written = in->written;
    act(c, 0);
    CHECK(!memcmp(before, c->in_bytes, (size_t)pair.capacity));
    CHECK(in->written == written);
    free(before);
}

static void *storm(void *seed) {
    begin_with(*(uint64_t *)seed);
    while (storming) {
        meddle(victim()->in, victim()->out, victim());
        if (one_in(50)) sched_yield();
    }
    return 0;
}

static void act_in_a_storm(void) {
    uint64_t seed = any();
    pthread_t peer;
    storming = 1;
    CHECK(!pthread_create(&peer, 0, storm, &seed));
    for (int n = 0; n < 300; n++) {
        act(victim(), 0);
        if (victim()->broken && one_in(4)) victim()->broken = 0;  // it is the reads that count
    }
    storming = 0;
    pthread_join(peer, 0);
}

void fuzz_damage(void) {
    open_pair(&pair, any_capacity(), one_in(8) ? 1ll << 62 : 1 << 16);
    if (one_in(20)) {
        act_in_a_storm();
    } else {
        for (int n = 0; n < 100; n++) {
            if (!one_in(3)) send_some(pair.sides[1]);  // so that there is something to damage
            if (one_in(3)) meddle_now();
            if (one_in(2))
                act_in_bounds();
            else
                act(victim(), meddle_now);
            if (one_in(4)) take_some(pair.sides[1], 0);
            if (victim()->broken && one_in(2)) break;
        }
    }
    close_pair(&pair);
}
