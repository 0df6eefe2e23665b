// Exchanges with peers that answer right, late, twice, in any order, wrongly, or die. A sum is made of right
// replies only, and has the bits of a plain one; all other messages are there for Python, once.
#include <stdlib.h>
#include <string.h>

#include "exchange/int8_rows.h"
#include "peers.h"

enum { DONE, RARE, LATE };
enum { LONGEST_TURN_NS = 100 * 1000 };  // of a wait that sleeps whenever nothing comes

static struct exchange exchanges[MOST_EXCHANGES];
static int slept_through;

static int act(void) {
    slept_through = 0;
    return let_peers_act();
}

static void oversleep(void) { slept_through = 1; }

// The messages of a peer that are on their way in whole: the others wait for room.
static int num_whole(const struct peer *peer) {
    int waiting = 0;
    for (struct waiting *w = peer->pair.sides[1]->first; w; w = w->next) waiting++;
    return peer->sent.num - waiting;
}

// The first message that answers a call; -1: none. `damaged`: there is one that is no frame.
static int first_answer(const struct exchange *x, int call, int *damaged) {
    const struct peer *peer = &peers[x->peers[call]];
    const int whole = num_whole(peer);
    struct frame_head head;
    int found = -1;
    for (int i = 0; i < whole; i++) {
        const enum decision d = decides(x, call, peer->sent.all[i], &head);
        if (d == NO_FRAME) *damaged = 1;
        if (found < 0 && (d == RIGHT || d == WRONG)) found = i;
    }
    return found;
}

static void add_plainly(const struct exchange *x, struct message m, float *node) {
    const int64_t hidden = x->ask.hidden, start = FRAME_HEADER;
    for (int64_t row = 0; row < x->asked.count; row++)
        for (int64_t i = 0; i < hidden; i++) {
            float value, scale;
            if (x->ask.code == FRAME_FLOAT32) {
                memcpy(&value, m.bytes + start + 4 * (row * hidden + i), 4);
            } else if (x->ask.code == FRAME_BFLOAT16) {
                value = 0;
                memcpy((uint8_t *)&value + 2, m.bytes + start + 2 * (row * hidden + i), 2);
            } else {
                const int64_t at = start + row * (hidden + SCALE_BYTES);
                memcpy(&scale, m.bytes + at + hidden, 4);
                value = (float)(int8_t)m.bytes[at + i] * scale;
            }
            node[row * hidden + i] += value;
        }
}

// Bits, but for those of numbers that are none.
static int equal(const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(a + i, b + i, 4) && !(a[i] != a[i] && b[i] != b[i])) return 0;
    return 1;
}

static void check_sum(const struct exchange *x, const struct message *replies) {
    const int64_t count = x->asked.count * x->ask.hidden;
    float *sum = exact(count * 4), *node = exact(count * 4);
    struct frame_head head;
    memset(sum, 0, (size_t)count * 4), memset(node, 0, (size_t)count * 4);
    for (int64_t n = 0; n < x->ask.num; n++) {
        const int call = (int)x->ask.order[n];
        CHECK(decides(x, call, replies[call], &head) == RIGHT);
        if (head.tensors[0].rows) add_plainly(x, replies[call], node);
        if (n < x->ask.num - 1 && x->ask.node_of[n + 1] == x->ask.node_of[n]) continue;
        for (int64_t i = 0; i < count; i++) sum[i] += node[i];
        memset(node, 0, (size_t)count * 4);
    }
    CHECK(equal(sum, x->asked.out, count));
    decides(x, 0, replies[0], &head);
    if (x->asked.basis_rows == 2)
        CHECK(!memcmp(x->asked.loads, replies[0].bytes + head.tensors[1].start,
                      (size_t)x->ask.num_workers * 8));
    const uint8_t *degraded = replies[0].bytes + head.tensors[head.num_tensors - 1].start;
    for (int64_t t = 0; x->asked.promises && t < x->asked.count; t++)
        CHECK(x->asked.degraded[t] == (int8_t)degraded[t]);
    free(sum), free(node);
}

static void check_slowest(const struct exchange *x, const struct message *replies) {
    int64_t slowest = 0;
    for (int call = 0; call < x->ask.num; call++) {
        struct frame_head head;
        decides(x, call, replies[call], &head);
        slowest = head.took_ns > slowest ? head.took_ns : slowest;
    }
    CHECK(x->asked.slowest_ns == slowest);
}

// All replies were right, the sum is theirs, and nobody sees them again.
static void check_done(const struct exchange *x) {
    struct message replies[MOST_PEERS];
    struct frame_head head;
    uint64_t digest = 0;
    CHECK(!slept_through);
    for (int call = 0; call < x->ask.num; call++) {
        int damaged;
        const int at = first_answer(x, call, &damaged);
        CHECK(at >= 0);
        replies[call] = take_at(&peers[x->peers[call]].sent, at);
        CHECK(decides(x, call, replies[call], &head) == RIGHT);
        CHECK(!call || head.digest == digest);
        digest = head.digest;
    }
    check_sum(x, replies);
    check_slowest(x, replies);
    for (int call = 0; call < x->ask.num; call++) free(replies[call].bytes);
}

// Something was wrong, or late: an exchange that went well is not given up, and one that cannot go well is
// not waited for.
static void check_given_up(const struct exchange *x, int outcome, int64_t began_ns) {
    int wrong = 0, missing = 0;
    uint64_t digest = 0;
    for (int call = 0; call < x->ask.num; call++) {
        const struct peer *peer = &peers[x->peers[call]];
        struct frame_head head = {.digest = digest};
        int damaged = 0;
        const int at = first_answer(x, call, &damaged);
        if (at >= 0 && decides(x, call, peer->sent.all[at], &head) == WRONG) wrong = 1;
        wrong |= damaged || peer->gone || (at >= 0 && call && head.digest != digest);
        missing |= at < 0 && !damaged;
        digest = head.digest;
        const int64_t gone_ns = peer->gone_ns > began_ns ? peer->gone_ns : began_ns;
        if (peer->gone && at < 0 && !damaged && outcome == LATE)
            CHECK(x->asked.deadline_ns < gone_ns + LONGEST_TURN_NS);
    }
    if (outcome == LATE) CHECK(clock_ns >= x->asked.deadline_ns && missing);
    if (outcome == RARE) CHECK(wrong);
}

static void see(struct peer *peer, const uint8_t *bytes, int64_t size) {
    free(take_at(&peer->sent, find(&peer->sent, bytes, size)).bytes);
}

// Ends an exchange that was left to Python, as Python does.
static void settle(struct exchange *x) {
    for (int call = 0; call < x->ask.num; call++) {
        struct peer *peer = &peers[x->peers[call]];
        struct channel *c = peer->pair.sides[0];
        struct list taken = {.num = 0};
        struct frame_head head;
        uint8_t *bytes;
        for (int64_t size; (size = channel_kept(c, &bytes)); channel_forget(c))
            append(&taken, copy_of(bytes, size));
        while (taken.num) {
            struct message m = take_at(&taken, 0);
            if (decides(x, call, m, &head) == NOTHING_YET)
                channel_hold(c, m.bytes, m.size);
            else
                see(peer, m.bytes, m.size);
            free(m.bytes);
        }
    }
    ask_end(&x->ask);
}

// Takes messages as an event loop does between the sending of a batch and its sum.
static void take_others(struct peer *peer) {
    struct channel *c = peer->pair.sides[0];
    uint8_t *bytes;
    for (int64_t size; (size = channel_take(c, &bytes)) > 0; channel_taken(c))
        see(peer, bytes, size);
}

// No peer sleeps on a request.
static void check_told(const struct exchange *x) {
    for (int call = 0; call < x->ask.num; call++) {
        const struct channel *c = peers[x->peers[call]].pair.sides[0];
        CHECK(!c->out->reader_sleeps || c->first || c->broken);
    }
}

static void finish(struct exchange *x) {
    const int64_t began_ns = clock_ns;
    slept_through = 0;
    const int outcome = ask_finish(&x->ask, &x->asked, bell);
    x->under_way = 0;
    if (outcome == DONE) {
        check_done(x);
    } else {
        check_given_up(x, outcome, began_ns);
        settle(x);
    }
}

static void check_nothing_is_left(void) {
    for (int p = 0; p < num_peers; p++) {
        struct peer *peer = &peers[p];
        struct channel *c = peer->pair.sides[0];
        CHECK(c->outstanding == 0);
        do take_others(peer);
        while (channel_pump(peer->pair.sides[1]));
        take_others(peer);
        CHECK(!c->kept && (c->broken || !peer->sent.num));
    }
}

void fuzz_asks(void) {
    open_peers();
    meanwhile = act, overslept = oversleep;
    uint64_t seq = any();
    for (int n = 0; n < 6; n++) {
        struct exchange *x = &exchanges[below(MOST_EXCHANGES)];
        if (x->under_way) finish(x), free_exchange(x);
        make_exchange(x, seq);
        seq += (uint64_t)x->ask.num;
        if (one_in(4)) let_peers_act();  // an answer before the question
        CHECK(!ask_begin(&x->ask, &x->asked));
        check_told(x);
        x->under_way = 1;
        while (!one_in(4)) let_peers_act();
        if (one_in(2)) take_others(&peers[below(num_peers)]);
    }
    for (int i = 0; i < MOST_EXCHANGES; i++) {
        struct exchange *x = &exchanges[i];
        if (x->under_way && one_in(4))
            ask_end(&x->ask);  // nobody finishes it
        else if (x->under_way)
            finish(x);
        free_exchange(x);
        x->under_way = 0;
    }
    check_nothing_is_left();
    check_caller();
    close_peers();
}
