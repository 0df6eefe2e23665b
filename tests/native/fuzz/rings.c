// Two sides that send, take, keep and sleep in any order: every message arrives once, whole, in order; a
// side that sleeps is woken, and one that may not sleep has something to do.
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { MOST_SENT = 256, KIND_AT = 8, SEQ_AT = 48 };

// Messages from one side to the other that were not taken yet, by the numbers that bring them back.
struct way {
    struct sent {
        uint64_t id;
        int64_t size;
        int awaited;  // an answer to a call that is waited for without Python
    } sent[MOST_SENT], kept[MOST_SENT];
    int num_sent, num_kept;
};

static struct pair pair;
static struct way ways[2];  // by the side that takes
static enum { AWAKE, ASLEEP, ASLEEP_FOR_ROOM } asleep[2];

static struct message message_of(const struct sent *sent) {
    struct message m = {exact(sent->size), sent->size};
    uint64_t bits = sent->id;
    for (int64_t i = 0; i < m.size; i++) {
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        m.bytes[i] = (uint8_t)(bits >> 56);
    }
    if (m.size < FRAME_HEADER) return m;
    const uint64_t seq = sent->awaited ? sent->id | 1ull << 63 : sent->id >> 1;
    m.bytes[KIND_AT] = sent->awaited && sent->id % 2 ? FRAME_ERROR : FRAME_REPLY;
    memcpy(m.bytes + SEQ_AT, &seq, sizeof seq);
    return m;
}

static void check_is(const struct sent *sent, const uint8_t *bytes, int64_t size) {
    struct message m = message_of(sent);
    CHECK(same(m, bytes, size));
    free(m.bytes);
}

static struct sent drop_first(struct sent *from, int *num) {
    const struct sent first = from[0];
    CHECK(*num > 0);
    memmove(from, from + 1, (size_t)--*num * sizeof *from);
    return first;
}

static int64_t any_size(void) {
    const int64_t capacity = pair.capacity;
    switch (below(5)) {
        case 0: return between(1, 200);
        case 1: return between(FRAME_HEADER, 400);
        case 2: return capacity / 4 + between(-130, 66);
        case 3: return capacity / 2 + between(-130, 66);
        default: return between(1, 3 * capacity);
    }
}

static void send_one(int side) {
    struct channel *c = pair.sides[side];
    struct way *way = &ways[!side];
    if (way->num_sent == MOST_SENT) return;
    struct sent sent = {any(), any_size(), one_in(3)};
    sent.size = sent.size < 1 ? 1 : sent.size;
    sent.awaited &= sent.size >= FRAME_HEADER;
    struct message m = message_of(&sent);
    uint8_t *room = one_in(2) ? channel_room(c, m.size) : 0;
    if (room) {
        memcpy(room, m.bytes, (size_t)m.size);
        channel_commit(c, m.size);
    } else {
        CHECK(!channel_send(c, m.bytes, m.size));
    }
    free(m.bytes);
    way->sent[way->num_sent++] = sent;
    is_rung(pair.bells[side]);
    // A side may look elsewhere once it has sent something.
    if (c->first && !channel_pump(c) && one_in(4)) asleep[side] = ASLEEP_FOR_ROOM;
}

// Follows `channel_take`: it keeps the answers at the front while some are awaited.
static void keep_awaited(struct way *way) {
    while (way->num_sent && way->sent[0].awaited) {
        CHECK(way->num_kept < MOST_SENT);
        way->kept[way->num_kept++] = drop_first(way->sent, &way->num_sent);
    }
}

// True if something came.
static int take_one(int side) {
    struct channel *c = pair.sides[side];
    struct way *way = &ways[side];
    uint8_t *message;
    const int all_here = !pair.sides[!side]->first;
    const int kept_first = !c->outstanding && way->num_kept;
    const int64_t size = channel_take(c, &message);
    CHECK(size >= 0);
    if (size && kept_first) {
        const struct sent sent = drop_first(way->kept, &way->num_kept);
        check_is(&sent, message, size);
    } else if (size) {
        if (c->outstanding) keep_awaited(way);
        const struct sent sent = drop_first(way->sent, &way->num_sent);
        check_is(&sent, message, size);
    } else {
        // Of the awaited ones as many were kept as have come.
        int64_t kept = 0;
        for (struct kept *k = c->kept; k; k = k->next) kept++;
        while (way->num_kept < kept) {
            CHECK(way->num_sent && way->sent[0].awaited);
            way->kept[way->num_kept++] = drop_first(way->sent, &way->num_sent);
        }
        CHECK(!all_here || !way->num_sent);
    }
    if (size) channel_taken(c);
    return size != 0;
}

// Looks at those kept, as their waiters do, and puts some back.
static void look_at_kept(int side) {
    struct channel *c = pair.sides[side];
    struct way *way = &ways[side];
    uint8_t *message;
    for (int times = way->num_kept; times--;) {
        const int64_t size = channel_kept(c, &message);
        const struct sent sent = drop_first(way->kept, &way->num_kept);
        check_is(&sent, message, size);
        struct message m = copy_of(message, size);
        channel_forget(c);
        if (one_in(2)) {
            channel_hold(c, m.bytes, m.size);
            way->kept[way->num_kept++] = sent;
        }
        free(m.bytes);
    }
}

// True if it did something: a part of a message is enough.
static int goes_on(struct channel *c) {
    const uint64_t read = c->next;
    int64_t size;
    return channel_pump(c) || channel_peek(c, &size) || c->next != read ||
           (c->kept && !c->outstanding);
}

static void sleep_or_not(int side) {
    struct channel *c = pair.sides[side];
    int64_t size;
    // No side sleeps on a message that it has seen.
    if (c->assembled && channel_peek(c, &size)) return;
    asleep[side] = channel_sleep(c) ? ASLEEP : AWAKE;
    CHECK(goes_on(c) == (asleep[side] == AWAKE));
}

static void check_wakes(int side) {
    if (!asleep[side] || one_in(4)) return;
    const int rung = is_rung(pair.bells[side]);
    if (!rung && asleep[side] == ASLEEP) CHECK(!goes_on(pair.sides[side]));
    if (!rung && asleep[side] == ASLEEP_FOR_ROOM) CHECK(!channel_pump(pair.sides[side]));
    if (rung) asleep[side] = AWAKE;
}

static void act(int side) {
    struct channel *c = pair.sides[side];
    if (asleep[side] && !one_in(8)) return;
    asleep[side] = AWAKE;
    switch (below(8)) {
        case 0:
        case 1: send_one(side); break;
        case 2:
        case 3:
            for (int64_t most = between(1, 8); most-- && take_one(side);) continue;
            break;
        case 4: c->outstanding = one_in(2); break;
        case 5: sleep_or_not(side); break;
        case 6: channel_pump(c); break;
        default: look_at_kept(side);
    }
    CHECK(!c->broken);
}

static void drain(void) {
    pair.sides[0]->outstanding = pair.sides[1]->outstanding = 0;
    for (int idle = 0; idle < 2;) {
        idle++;
        for (int side = 0; side < 2; side++) {
            if (channel_pump(pair.sides[side])) idle = 0;
            while (take_one(side)) idle = 0;
        }
    }
    for (int side = 0; side < 2; side++)
        CHECK(!ways[side].num_sent && !ways[side].num_kept && !pair.sides[side]->first);
}

void fuzz_rings(void) {
    open_pair(&pair, any_capacity(), 1ll << 62);
    memset(ways, 0, sizeof ways), memset(asleep, 0, sizeof asleep);
    for (int n = 0; n < 200; n++) {
        const int side = (int)below(2);
        act(side);
        check_wakes(!side);
    }
    if (!one_in(4)) drain();  // else the messages on their way are freed with the channel
    close_pair(&pair);
}
