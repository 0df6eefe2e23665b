// Batches that two workers answer on threads of their own. All sleep at once where there is nothing to do:
// every batch takes wake-ups on both sides.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "layer.h"
#include "threads.h"

enum { WORKERS = 2, BATCHES = 8, DONE = 0 };

static struct worker {
    struct pair pair;  // the asking side is 0
    struct answers *answers;
    int end;  // readable once the worker may go
    pthread_t thread;
} workers[WORKERS];

static struct layer_here layer;

// Requests, and the sums that they are to bring.
static struct batch_here {
    struct message request;
    struct frame_head head;
    float *sum, *out;
    int64_t *loads;
} batches[BATCHES];

static void watch(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
}

static void *serve(void *of) {
    struct worker *w = of;
    void *channels[1] = {w->pair.sides[1]};
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    watch(epoll, w->end), watch(epoll, w->pair.bells[1]);
    while (wait_for_events(channels, 1, epoll, w->pair.bells[1], LONGEST_S * 1000000000ll) !=
           2)
        CHECK(!w->pair.sides[1]->broken);
    CHECK(is_rung(w->end));
    close(epoll);
    return 0;
}

static void open_worker(struct worker *w, int bell) {
    open_pair(&w->pair, 256 * between(4, 64), 1ll << 62);
    w->pair.sides[1]->bell = bell;
    CHECK((w->end = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) >= 0);
    CHECK((w->answers = answers_open(64, 4096, 1 << 20, 2)));
    answers_add(w->answers, &layer.is);
    channel_answer(w->pair.sides[1], w->answers);
    CHECK(!pthread_create(&w->thread, 0, serve, w));
}

static void close_worker(struct worker *w) {
    const uint64_t one = 1;
    CHECK(write(w->end, &one, sizeof one) == sizeof one);
    pthread_join(w->thread, 0);
    close(w->end), close_pair(&w->pair), answers_close(w->answers);
}

// Both workers give the same part.
static void make_batch(struct batch_here *b) {
    struct frame_head head;
    b->request = request_for(&layer, between(1, 64), 0, one_in(2), 0);
    const struct frame_limits limits = {64, 4096, 1 << 20};
    CHECK(!frame_read(b->request.bytes, b->request.size, &limits, &b->head));
    b->head.threshold = 1, frame_seal(b->request.bytes, &b->head);
    struct message reply = reply_of(&layer, b->request.bytes, &b->head, 1);
    CHECK(!frame_read(reply.bytes, reply.size, &limits, &head));
    const int64_t count = (int64_t)b->head.tensors[0].rows * b->head.tensors[0].cols;
    const float *part = (const float *)(reply.bytes + head.tensors[0].start);
    b->sum = exact(count * 4), b->out = exact(count * 4);
    b->loads = exact(layer.is.num_workers * 8);
    for (int64_t i = 0; i < count; i++)
        b->sum[i] = head.tensors[0].rows ? 0.0f + part[i] + part[i] : 0.0f;
    free(reply.bytes);
}

static void ask_one(const struct ask *ask, struct batch_here *b, uint64_t seq, int bell) {
    const int64_t count = b->head.tensors[0].rows;
    struct asked asked = {.seq = seq,
                          .rows = (const float *)(b->request.bytes + b->head.tensors[0].start),
                          .basis = (const int64_t *)(b->request.bytes + b->head.tensors[1].start),
                          .count = count,
                          .basis_rows = b->head.tensors[1].rows,
                          .basis_size = layer.is.basis_size,
                          .out = b->out,
                          .loads = b->loads,
                          .deadline_ns = now_ns() + LONGEST_S * 1000000000ll};
    CHECK(!ask_begin(ask, &asked));
    CHECK(ask_finish(ask, &asked, bell) == DONE);
    for (int64_t i = 0; i < count * ask->hidden; i++)
        CHECK(b->out[i] == b->sum[i] || (b->out[i] != b->out[i] && b->sum[i] != b->sum[i]));
}

void ask_workers(uint64_t seed, uint64_t count) {
    static const int64_t order[WORKERS] = {1, 0}, node_of[WORKERS] = {0, 0};
    void *channels[WORKERS];
    begin_with(seed);
    make_layer(&layer, 7, 3);
    layer.is.counts = 0;
    const int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (int n = 0; n < WORKERS; n++)
        open_worker(&workers[n], bell), channels[n] = workers[n].pair.sides[0];
    for (int i = 0; i < BATCHES; i++) make_batch(&batches[i]);
    const struct ask ask = {.channels = channels, .num = WORKERS, .order = order,
                            .node_of = node_of, .num_workers = layer.is.num_workers,
                            .epoch = layer.is.epoch, .layer = layer.is.layer,
                            .hidden = layer.is.moe.gate.num_in, .max_rows = 64,
                            .max_cols = 4096, .max_bytes = 1 << 20, .code = FRAME_FLOAT32};
    for (uint64_t n = 0; n < count; n++)
        ask_one(&ask, &batches[below(BATCHES)], 1ull << 63 | n * WORKERS, bell);
    for (int n = 0; n < WORKERS; n++) close_worker(&workers[n]);
    for (int i = 0; i < BATCHES; i++)
        free(batches[i].request.bytes), free(batches[i].sum), free(batches[i].out),
            free(batches[i].loads);
    free_layer(&layer);
    close(bell);
}
