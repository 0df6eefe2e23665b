#include "peers.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { MOST_IDLE = 200 };  // turns in which nobody does anything, by chance

struct peer peers[MOST_PEERS];
struct pair caller;
int num_peers, bell;

static int idle;  // turns of those in a row
static struct answers *answers;  // to the caller
static int num_pings, num_others;

void append(struct list *list, struct message m) {
    CHECK(list->num < MOST_MESSAGES);
    list->all[list->num++] = m;
}

struct message take_at(struct list *list, int at) {
    const struct message m = list->all[at];
    CHECK(at >= 0 && at < list->num);
    memmove(list->all + at, list->all + at + 1, (size_t)(--list->num - at) * sizeof m);
    return m;
}

int find(const struct list *list, const uint8_t *bytes, int64_t size) {
    for (int i = 0; i < list->num; i++)
        if (same(list->all[i], bytes, size)) return i;
    return -1;
}

static void free_all(struct list *list) {
    while (list->num) free(list->all[--list->num].bytes);
}

void open_peers(void) {
    num_peers = (int)between(1, MOST_PEERS), idle = 0;
    CHECK((bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) >= 0);
    for (int p = 0; p < num_peers; p++) {
        peers[p] = (struct peer){.gone = 0};
        open_pair(&peers[p].pair, any_capacity(), 1ll << 62);
        peers[p].pair.sides[1]->bell = bell;  // one for all channels of a process
    }
    open_pair(&caller, 1 << 14, 1ll << 62);
    CHECK((answers = answers_open(64, 4096, 1 << 20, 1)));
    channel_answer(caller.sides[0], answers);
    num_pings = num_others = 0;
}

static void let_caller_ask(void) {
    struct frame_head head = {.kind = one_in(4) ? FRAME_NOTE : FRAME_PING, .seq = any()};
    struct message m = frame_of(&head);
    CHECK(!channel_send(caller.sides[1], m.bytes, m.size));
    free(m.bytes);
    num_pings += head.kind == FRAME_PING, num_others += head.kind != FRAME_PING;
}

void check_caller(void) {
    uint8_t *message;
    channel_pump(caller.sides[1]);
    for (int side = 0; side < 2; side++)
        for (struct channel *c = caller.sides[side]; channel_take(c, &message) > 0;) {
            if (message[8] == FRAME_NOTE)
                num_others--;
            else
                num_pings--;
            channel_taken(c);
            channel_pump(caller.sides[!side]);
        }
    CHECK(!num_pings && !num_others);
}

void close_peers(void) {
    for (int p = 0; p < num_peers; p++) {
        close_pair(&peers[p].pair);
        free_all(&peers[p].requests), free_all(&peers[p].script), free_all(&peers[p].sent);
    }
    close_pair(&caller), answers_close(answers);
    close(bell);
}

static void take_requests(struct peer *peer) {
    uint8_t *message;
    int64_t size;
    while ((size = channel_take(peer->pair.sides[1], &message)) > 0) {
        struct message m = take_at(&peer->requests, 0);
        CHECK(same(m, message, size));
        free(m.bytes);
        channel_taken(peer->pair.sides[1]);
    }
    CHECK(!size);
}

static void go(struct peer *peer) {
    static const uint64_t one = 1;
    struct channel *c = peer->pair.sides[0];
    const uint64_t wrong = (uint64_t)between(-1, peer->pair.capacity) * 64 + 7;
    peer->gone = 1, peer->gone_ns = clock_ns;
    if (one_in(2))
        CHECK(write(peer->pair.controls[0], &one, sizeof one) == sizeof one);
    else
        atomic_store(&c->in->written, c->next + wrong);
}

int let_peers_act(void) {
    struct peer *peer = &peers[below(num_peers)];
    const int requests = peer->requests.num, script = peer->script.num;
    int moved = 0;
    if (one_in(20)) let_caller_ask();
    if (!peer->gone) {
        moved = channel_pump(peer->pair.sides[1]);
        if (one_in(2)) take_requests(peer);
        if (one_in(4)) channel_sleep(peer->pair.sides[1]);
        if (one_in(2) && script) {
            struct message m = take_at(&peer->script, 0);
            if (!m.bytes) {
                go(peer);
            } else {
                CHECK(!channel_send(peer->pair.sides[1], m.bytes, m.size));
                append(&peer->sent, m);
            }
        }
    }
    idle = moved || requests != peer->requests.num || script != peer->script.num ? 0 : idle + 1;
    return idle < MOST_IDLE;
}
