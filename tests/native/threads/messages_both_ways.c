// Two threads that send and take, and sleep when there is nothing to do.
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

static struct pair pair;
static uint64_t messages;  // each way
static uint64_t seeds[2];  // of the messages of each side
static int one_by_one;     // with pauses as long as it takes the other side to fall asleep

// Some words of a number; the same for both sides.
static struct message nth_message(int from, uint64_t n) {
    uint64_t bits = (seeds[from] + n) * 0x9e3779b97f4a7c15u;
    const uint64_t most = bits >> 60 ? 40 : (uint64_t)pair.capacity / 4;  // in words
    const int64_t words = 1 + (int64_t)((bits >> 20) % most);
    struct message m = {exact(words * 8), words * 8};
    for (int64_t i = 0; i < words; i++, bits = bits * 5 + 1) memcpy(m.bytes + 8 * i, &bits, 8);
    return m;
}

static void pause_a_moment(void) {
    for (volatile int64_t n = below(3000); n > 0; n--) continue;
}

static void sleep_until_rung(struct channel *c, int bell) {
    struct pollfd fd = {.fd = bell, .events = POLLIN};
    if (!channel_sleep(c)) return;
    CHECK(poll(&fd, 1, LONGEST_S * 1000) == 1);
    CHECK(is_rung(bell));
}

static void *one_side(void *of) {
    const int side = *(int *)of;
    struct channel *c = pair.sides[side];
    uint64_t sent = 0, taken = 0;
    begin_with(seeds[side]);
    while (sent < messages || taken < messages || c->first) {
        uint8_t *message;
        int moved = channel_pump(c);
        int64_t most = one_by_one ? 1 : between(1, 6);
        for (; most-- && sent < messages && !c->first; moved = 1) {
            struct message m = nth_message(side, sent++);
            CHECK(!channel_send(c, m.bytes, m.size));
            free(m.bytes);
        }
        if (one_by_one) pause_a_moment();
        int64_t size = 0;
        for (most = below(6); most-- > 0 && (size = channel_take(c, &message)); moved = 1) {
            struct message m = nth_message(!side, taken++);
            CHECK(same(m, message, size));
            channel_taken(c);
            free(m.bytes);
        }
        const int may_send = sent < messages && !c->first;
        if (!moved && !may_send) sleep_until_rung(c, pair.bells[side]);
    }
    return 0;
}

void pass_messages(uint64_t seed, uint64_t count) {
    pthread_t other;
    begin_with(seed);
    messages = count, seeds[0] = any(), seeds[1] = any(), one_by_one = seed % 2;
    open_pair(&pair, 256 * between(4, 64), 1ll << 62);
    CHECK(!pthread_create(&other, 0, one_side, &(int){1}));
    one_side(&(int){0});
    pthread_join(other, 0);
    close_pair(&pair);
}
