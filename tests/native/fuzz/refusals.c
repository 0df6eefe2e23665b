// Numbers that no sender of ours writes to a ring: each of them ends the channel at once.
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { RECORD_HEAD = 64, SKIP_FLAG = 1, MOST = 1 << 16 };

static struct pair pair;

static int64_t taken(void) {
    uint8_t *message;
    return channel_take(pair.sides[0], &message);
}

static int sent(void) {
    static const uint8_t message[100];
    return channel_send(pair.sides[0], message, sizeof message);
}

// To some place of the ring from which a few records fit before its end.
static uint64_t go_somewhere(void) {
    struct channel *c = pair.sides[0];
    uint8_t *message;
    uint64_t to_end;
    do {
        struct message m = {exact(200), between(1, 200)};
        scramble(m.bytes, m.size);
        CHECK(!channel_send(pair.sides[1], m.bytes, m.size));
        CHECK(channel_take(c, &message) == m.size);
        channel_taken(c), free(m.bytes);
        to_end = c->capacity - c->next % c->capacity;
    } while (to_end < 8 * RECORD_HEAD || one_in(2));
    return to_end;
}

// A record that lies next, with so many bytes of the ring written behind its start.
static void put(uint64_t size, uint64_t part, uint64_t flags, uint64_t bytes) {
    const struct channel *c = pair.sides[0];
    const uint64_t record[3] = {size, part, flags};
    memcpy(c->in_bytes + c->next % c->capacity, record, sizeof record);
    atomic_store(&c->in->written, c->next + bytes);
}

static void refuse_record(uint64_t to_end) {
    struct channel *c = pair.sides[0];
    const uint64_t part = (uint64_t)between(1, 64), too_long = MOST + 1 + (edge() & INT64_MAX) / 2;
    switch (below(9)) {
        case 0: put(part, part, 0, c->capacity + 64 * (uint64_t)between(1, 100)); break;
        case 1: put(part, part, 0, 128 + (uint64_t)between(1, 63)); break;
        case 2: put(part, part, 2 + edge() / 2, 128); break;
        case 3: put(part, 0, 0, 64); break;
        case 4: put(part, part + (uint64_t)between(1, 64), 0, 256); break;
        case 5: put(part + 64, part + 64, 0, 64 * (uint64_t)between(1, 2)); break;
        case 6: put(0, 0, SKIP_FLAG, to_end - 64 * (uint64_t)between(1, 7)); break;
        case 7:
            put(too_long, part, 0, 128);
            CHECK(taken() == -1 && channel_excess(c) == (int64_t)too_long);
            break;
        default:
            put(200, 64, 0, 128);
            CHECK(!taken() && !c->broken);
            if (one_in(2))
                put(one_in(2) ? 199 : 201, 64, 0, 128);  // of another message
            else
                put(200, 200 - 64 + (uint64_t)between(1, 64), 0, 64 + 256);  // more than is left
    }
    CHECK(taken() == -1);
}

static void refuse_counter(void) {
    struct channel *c = pair.sides[0];
    const uint64_t by = (uint64_t)between(1, 1000);
    CHECK(!sent());
    atomic_store(&c->out->read, one_in(2) ? c->wrote + by : c->wrote - c->capacity - by);
    CHECK(sent() == -1);
}

void fuzz_refusals(void) {
    open_pair(&pair, 256 * between(4, 16), MOST);
    const uint64_t to_end = go_somewhere();
    if (one_in(8))
        refuse_counter();
    else
        refuse_record(to_end);
    CHECK(taken() == -1 && sent() == -1 && !channel_sleep(pair.sides[0]));
    close_pair(&pair);
}
