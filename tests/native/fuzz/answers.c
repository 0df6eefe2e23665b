// Requests, right and almost right: those that are right are answered, each once and to the bit, and all
// others are left to Python, as they came.
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "exchange/answer.h"
#include "exchange/int8_rows.h"
#include "layer.h"

enum { MOST_LAYERS = 3, LOG_HEAD = 7, TOOK_AT = 20, CROWD = 1500 };

static struct layer_here layers[MOST_LAYERS];
static int num_layers, is_known[MOST_LAYERS];
static struct answers *answers;
static struct frame_limits limits;
static int threads, epoll, crowded;
static struct message coming;  // to the ring, from a client that takes its time
static struct pair pair;  // the worker is side 0
static int64_t logged, answered;
static int32_t *taken;

// The place of a tensor of a request, and its numbers spoilt, now and then.
static void spoil(struct message *m) {
    struct frame_head head;
    if (frame_read(m->bytes, m->size, &limits, &head)) return;
    int64_t *basis = (int64_t *)(m->bytes + head.tensors[1].start);
    const int64_t numbers = (int64_t)head.tensors[1].rows * head.tensors[1].cols;
    switch (below(10)) {
        case 0: basis[below(numbers)] = (int64_t)edge(); break;
        case 1: basis[below(numbers)] += between(-2, 2); break;
        case 2: basis[numbers - 1] = (1ll << 40) + between(-1, 1); break;
        case 3: head.layer += (int32_t)between(-1, 1); break;
        case 4: head.epoch += (uint64_t)between(-1, 1); break;
        case 5: head.kind = (int)between(FRAME_REQUEST, FRAME_NOTE); break;
        case 6: head.flags = one_in(2); break;
        case 7: head.tensors[below(2)].code = (uint32_t)between(FRAME_FLOAT32, FRAME_INT8); break;
        case 8: head.tensors[below(2)].cols -= 1; break;
        default: {  // the tensors change places, are fewer or more
            const struct tensor_place first = head.tensors[0];
            if (one_in(3)) head.tensors[0] = head.tensors[1], head.tensors[1] = first;
            head.num_tensors = (int)between(0, FRAME_TENSORS);
            for (int i = 2; i < head.num_tensors; i++) head.tensors[i] = first;
        }
    }
    const uint8_t *before = m->bytes;
    struct message other = frame_of(&head);
    const int64_t size = other.size < m->size ? other.size : m->size;
    memcpy(other.bytes + FRAME_HEADER, before + FRAME_HEADER, (size_t)(size - FRAME_HEADER));
    free(m->bytes), *m = other;
    reseal(m);
}

static struct message any_request(void) {
    const struct layer_here *layer = &layers[below(num_layers)];
    if (crowded && !one_in(50)) return request_for(layer, limits.max_rows, 0, 0, 0);
    if (one_in(16)) {
        struct frame_head ping = {.kind = FRAME_PING, .num_tensors = one_in(4), .seq = any()};
        return frame_of(&ping);
    }
    const int64_t rows = one_in(10) ? limits.max_rows + between(-1, 1) : below(one_in(4) ? 60 : 6);
    struct message m = request_for(layer, rows, one_in(2), one_in(2), one_in(2));
    if (one_in(2)) spoil(&m);
    if (one_in(6)) damage(&m);
    return m;
}

static struct message pong_of(uint64_t seq) {
    struct frame_head pong = {.kind = FRAME_PONG, .threshold = 1, .seq = seq};
    return frame_of(&pong);
}

// The answer that is owed to a message; without bytes: it is Python's.
static struct message owed(struct message m) {
    struct frame_head head;
    if (!read_plainly(m.bytes, m.size, &limits, &head)) return (struct message){0};
    if (head.kind == FRAME_PING && !head.num_tensors) return pong_of(head.seq);
    for (int i = 0; i < num_layers; i++) {
        const struct answerable *is = &layers[i].is;
        if (!is_known[i] || !is_request_for(&layers[i], m.bytes, &head)) continue;
        const int64_t line = LOG_HEAD + head.tensors[0].rows * is->moe.top_k;
        if (is->counts && logged + line > answers_log_size()) break;
        if (is->counts) logged += line;
        answered++;
        return reply_of(&layers[i], m.bytes, &head, threads);
    }
    return (struct message){0};
}

static void check_comes(struct message reply) {
    uint8_t *message;
    channel_pump(pair.sides[0]);
    int64_t size;
    for (int tries = 0; !(size = channel_take(pair.sides[1], &message)); tries++) {
        CHECK(tries < 1000);
        channel_pump(pair.sides[0]);
    }
    if (size == reply.size) {  // how long it took is for the worker to say
        memcpy(reply.bytes + TOOK_AT, message + TOOK_AT, 4);
        reseal(&reply);
    }
    CHECK(same(reply, message, size));
    channel_taken(pair.sides[1]);
}

static int answer_copy(struct message m) { return answer(answers, pair.sides[0], m.bytes, m.size); }

static int let_client_act(void) {
    if (coming.bytes && !one_in(3)) return 1;
    if (coming.bytes) CHECK(!channel_send(pair.sides[1], coming.bytes, coming.size));
    if (coming.bytes) return coming.bytes = 0, 1;
    return channel_pump(pair.sides[1]);
}

static void check_sleep(void) { CHECK(!channel_is_ready(pair.sides[0])); }

static int answer_from_ring(struct message m) {
    void *channels[1] = {pair.sides[0]};
    int64_t size = 0;
    uint8_t *message;
    meanwhile = let_client_act, overslept = check_sleep;
    coming = m;
    for (int left = 1, found = 0; left && found != 1;) {
        const int64_t timeout = one_in(2) ? 0 : below(20 * 1000 * 1000);
        let_client_act();
        left = coming.bytes || pair.sides[1]->first;
        found = wait_for_events(channels, 1, epoll, pair.bells[0], timeout);
        if (found == 1) CHECK((size = channel_take(pair.sides[0], &message)) > 0);
    }
    meanwhile = 0, overslept = 0;
    if (!size) return 1;
    CHECK(same(m, message, size));
    channel_taken(pair.sides[0]);
    return 0;
}

static void check_one(void) {
    uint8_t *message;
    struct message m = any_request();
    const struct message reply = owed(m);
    const int done = one_in(2) || !m.size ? answer_copy(m) : answer_from_ring(m);
    CHECK(done == (reply.bytes != 0));
    if (done) check_comes(reply);
    CHECK(!channel_take(pair.sides[1], &message));
    free(reply.bytes), free(m.bytes);
}

static void check_counts(void) {
    struct answer_tally tally;
    answers_tally(answers, &tally);
    CHECK(tally.batches == answered);
    CHECK(answers_log(answers, taken) == logged);
    for (int64_t at = 0; at < logged; at += LOG_HEAD + taken[at + 4] * taken[at + 5])
        CHECK(taken[at + 4] > 0 && taken[at + 5] > 0);
    answered = logged = 0;
}

static void know(int i, int known) {
    if (known == is_known[i]) return;
    if (known) answers_add(answers, &layers[i].is);
    if (known) CHECK(answers_asked(answers, layers[i].is.epoch) > 0);
    if (!known) answers_drop(answers, layers[i].is.epoch);
    for (int j = 0; j < num_layers; j++)  // all layers of an epoch end together
        if (!known && layers[j].is.epoch == layers[i].is.epoch) is_known[j] = 0;
    if (known) is_known[i] = 1;
}

void fuzz_answers(void) {
    limits = (struct frame_limits){one_in(2) ? 64 : 100, one_in(8) ? 20 : 4096, 1 << 20};
    threads = one_in(4) ? 2 : 1, num_layers = (int)between(1, MOST_LAYERS);
    answers = answers_open(limits.max_rows, limits.max_cols, limits.max_bytes, threads);
    taken = exact(answers_log_size() * 4);
    CHECK(answers);
    open_pair(&pair, any_capacity(), 1ll << 62);
    channel_answer(pair.sides[0], answers);
    CHECK((epoll = epoll_create1(EPOLL_CLOEXEC)) >= 0);
    epoll_ctl(epoll, EPOLL_CTL_ADD, pair.bells[0],
              &(struct epoll_event){.events = EPOLLIN, .data.fd = pair.bells[0]});
    logged = answered = 0, crowded = one_in(200);  // until there is no room for more counts
    const uint64_t epoch = edge();
    for (int i = 0; i < num_layers; i++) {
        make_layer(&layers[i], epoch + (uint64_t)below(2), 10 * i);
        layers[i].is.counts |= crowded;
        is_known[i] = 0;
        know(i, 1);
    }
    for (int n = 0; n < (crowded ? CROWD : 30); n++) {
        check_one();
        if (crowded) continue;
        if (one_in(16)) know((int)below(num_layers), one_in(2));
        if (one_in(16)) check_counts();
    }
    check_counts();
    close(epoll);
    close_pair(&pair);
    answers_close(answers);
    for (int i = 0; i < num_layers; i++) free_layer(&layers[i]);
    free(taken);
}
