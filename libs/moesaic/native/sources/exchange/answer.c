#include "exchange/answer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "exchange/frame.h"
#include "exchange/int8_rows.h"
#include "exchange/promised.h"
#include "exchange/xxh3.h"

enum { BUCKETS = 1024, MAX_LOG = 1 << 18, LOG_HEAD = 7, MAX_SAMPLES = 256, SAMPLE = 3 };
static const int64_t MAX_LOAD = 1ll << 40;

struct known {
    struct known *next;
    struct answerable is;
    int64_t asked_ns;
};

struct answers {
    // Held while a request is answered. Others take it to change what is known, and wait for that.
    pthread_mutex_t lock;
    pthread_mutex_t notes;  // of numbers, and to read what is known; held for moments only
    struct known *known[BUCKETS];
    struct frame_limits limits;
    int threads;
    uint8_t *scratch;
    int64_t scratch_bytes;
    struct answer_tally tally;
    int32_t *log;  // batches: epoch (two), layer, policy, rows, top_k, busiest, ids
    int64_t logged;
    int64_t samples[MAX_SAMPLES * SAMPLE];  // the last ones: experts, choices, ns
    int64_t sampled;
};

EXPORT void *answers_open(int64_t max_rows, int64_t max_cols, int64_t max_bytes,
                                    int threads) {
    struct answers *a = calloc(1, sizeof *a);
    if (!a) return 0;
    if (!(a->log = malloc(MAX_LOG * sizeof *a->log))) {
        free(a);
        return 0;
    }
    pthread_mutex_init(&a->lock, 0);
    pthread_mutex_init(&a->notes, 0);
    a->limits = (struct frame_limits){max_rows, max_cols, max_bytes};
    a->threads = threads;
    return a;
}

EXPORT void answers_close(void *answers) {
    struct answers *a = answers;
    for (int i = 0; i < BUCKETS; i++)
        for (struct known *k = a->known[i], *next; k; k = next) next = k->next, free(k);
    free(a->scratch);
    free(a->log);
    free(a);
}

static struct known **bucket_of(struct answers *a, uint64_t epoch, int64_t layer) {
    return &a->known[(epoch * 0x9e3779b97f4a7c15u + (uint64_t)layer * 31) >> 20 & (BUCKETS - 1)];
}

static void lock_both(struct answers *a) {
    pthread_mutex_lock(&a->lock);
    pthread_mutex_lock(&a->notes);
}

static void unlock_both(struct answers *a) {
    pthread_mutex_unlock(&a->notes);
    pthread_mutex_unlock(&a->lock);
}

EXPORT void answers_add(void *answers, const struct answerable *found) {
    struct answers *a = answers;
    struct known *k = malloc(sizeof *k);
    if (!k) return;
    *k = (struct known){0, *found, now_ns()};
    lock_both(a);
    struct known **bucket = bucket_of(a, found->epoch, found->layer);
    k->next = *bucket;
    *bucket = k;
    unlock_both(a);
}

EXPORT void answers_drop(void *answers, uint64_t epoch) {
    struct answers *a = answers;
    lock_both(a);
    for (int i = 0; i < BUCKETS; i++)
        for (struct known **at = &a->known[i]; *at;) {
            struct known *k = *at;
            if (k->is.epoch == epoch)
                *at = k->next, free(k);
            else
                at = &k->next;
        }
    unlock_both(a);
}

EXPORT int64_t answers_asked(void *answers, uint64_t epoch) {
    struct answers *a = answers;
    int64_t latest = 0;
    pthread_mutex_lock(&a->notes);
    for (int i = 0; i < BUCKETS; i++)
        for (struct known *k = a->known[i]; k; k = k->next)
            if (k->is.epoch == epoch && k->asked_ns > latest) latest = k->asked_ns;
    pthread_mutex_unlock(&a->notes);
    return latest;
}

EXPORT void answers_tally(void *answers, struct answer_tally *taken) {
    struct answers *a = answers;
    pthread_mutex_lock(&a->notes);
    *taken = a->tally;
    a->tally = (struct answer_tally){0};
    pthread_mutex_unlock(&a->notes);
}

EXPORT int64_t answers_log_size(void) { return MAX_LOG; }

EXPORT int64_t answers_log(void *answers, int32_t *taken) {
    struct answers *a = answers;
    pthread_mutex_lock(&a->notes);
    const int64_t count = a->logged;
    memcpy(taken, a->log, (size_t)count * sizeof *taken);
    a->logged = 0;
    pthread_mutex_unlock(&a->notes);
    return count;
}

EXPORT int64_t answers_samples(void *answers, int64_t *taken) {
    struct answers *a = answers;
    pthread_mutex_lock(&a->notes);
    const int64_t count = a->sampled < MAX_SAMPLES ? a->sampled : MAX_SAMPLES;
    memcpy(taken, a->samples, (size_t)(count * SAMPLE) * sizeof *taken);
    a->sampled = 0;
    pthread_mutex_unlock(&a->notes);
    return count;
}

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static uint8_t *scratch_of(struct answers *a, int64_t bytes) {
    if (bytes > a->scratch_bytes) {
        free(a->scratch);
        a->scratch_bytes = 0;
        if (!(a->scratch = aligned_alloc(64, (size_t)rounded(bytes)))) return 0;
        a->scratch_bytes = bytes;
    }
    return a->scratch;
}

// Parts of the scratch for one batch.
struct desk {
    float *rows, *sums;  // of a request in bytes
    float *logits, *weights;
    int32_t *ids, *instance, *replica, *of_choice;
    int64_t *load;
    int32_t *degraded;  // [T], of a request with promises
    uint8_t *body;
    uint8_t *decision, *rest;
};

enum { DECISION_HEAD = 8 + 8 + 8 + 1 + 3 * 8 };

static int64_t lay_out_desk(struct desk *d, uint8_t *at, const struct answerable *is,
                            const struct frame_head *request, int threads) {
    const int64_t rows = request->tensors[0].rows, top_k = is->moe.top_k, chosen = rows * top_k;
    const int64_t num_own = is->moe.gate.num_out, num_experts = is->num_experts;
    const int in_bytes = request->tensors[0].code == FRAME_INT8;
    const int64_t unpacked = in_bytes ? rows * is->moe.gate.num_in * 4 : 0;
    uint8_t *start = at;
#define PLACE(field, bytes) d->field = (void *)at, at += rounded(bytes)
    PLACE(rows, unpacked);
    PLACE(sums, unpacked);
    PLACE(logits, rows * num_own * 4);
    PLACE(weights, chosen * 4);
    PLACE(ids, chosen * 4);
    PLACE(instance, num_experts * 4);
    PLACE(replica, num_experts * 4);
    PLACE(of_choice, chosen * 4);
    PLACE(load, is->num_workers * 8);
    PLACE(degraded, request->body_size ? rows * 4 : 0);
    PLACE(body, request->body_size);
    PLACE(decision, DECISION_HEAD + (chosen + num_experts) * 4);
    const int64_t scheduling = schedule_experts_scratch(num_experts, is->num_workers);
    const int64_t computing = experts_scratch(rows, top_k, is->moe.gate.num_in, is->moe.size,
                                              is->num_slots, threads);
    const int64_t splitting = split_choices_scratch(num_own);
    const int64_t most = scheduling > computing ? scheduling : computing;
    PLACE(rest, most > splitting ? most : splitting);
#undef PLACE
    return at - start;
}

// The digest of moesaic.experts.assignment.decision_digest.
static uint64_t digest_of(const struct desk *d, const struct answerable *is,
                          const struct frame_head *request, int64_t rows) {
    const int64_t num_experts = is->num_experts, top_k = is->moe.top_k;
    const int64_t layer = request->layer, shape[3] = {rows, top_k, num_experts};
    const double threshold = request->threshold;
    uint8_t *at = d->decision;
    memcpy(at, &request->epoch, 8);
    memcpy(at + 8, &layer, 8);
    memcpy(at + 16, &threshold, 8);
    at[24] = 3;
    memcpy(at + 25, shape, sizeof shape);
    memcpy(at + DECISION_HEAD, d->ids, (size_t)(rows * top_k) * 4);
    memcpy(at + DECISION_HEAD + rows * top_k * 4, d->instance, (size_t)num_experts * 4);
    return xxh3_64(at, DECISION_HEAD + (rows * top_k + num_experts) * 4, 0);
}

// Loads that other batches left, by worker; false: they are none that a sender of ours writes.
static int take_loads(const struct answerable *is, const int64_t *loads, int64_t *load) {
    memset(load, 0, (size_t)is->num_workers * 8);
    if (!loads) return 1;
    if (loads[0]) return 0;
    for (int64_t i = 1; i < is->basis_size; i++) {
        const int64_t each = loads[i];
        if (each < 0 || each > MAX_LOAD) return 0;
        load[is->basis[i]] = each;
    }
    return 1;
}

static void take_sample(struct answers *a, const struct answerable *is, const struct desk *d,
                        int64_t rows, int64_t own, int64_t took_ns) {
    int64_t choices = 0;
    for (int64_t i = 0; i < rows * is->moe.top_k; i++) choices += d->of_choice[i] >= 0;
    int64_t *sample = a->samples + a->sampled++ % MAX_SAMPLES * SAMPLE;
    sample[0] = own, sample[1] = choices, sample[2] = took_ns;
}

static void note(struct answers *a, const struct answerable *is, const struct desk *d, int64_t rows,
                 int64_t own, int64_t most) {
    struct answer_tally *t = &a->tally;
    t->batches++, t->rows += rows, t->most_experts += most, t->experts += own;
    int64_t *count = &t->up_to_0;
    for (int64_t bound = 0; own > bound && count < &t->up_to_any; count++)
        bound = bound ? 2 * bound : 1;
    ++*count;
    if (!is->counts) return;
    int32_t *log = a->log + a->logged;
    const int32_t head[LOG_HEAD] = {(int32_t)is->epoch,        (int32_t)(is->epoch >> 32),
                                    (int32_t)is->layer,        (int32_t)is->basis[0],
                                    (int32_t)rows,             (int32_t)is->moe.top_k,
                                    (int32_t)most};
    memcpy(log, head, sizeof head);
    memcpy(log + LOG_HEAD, d->ids, (size_t)(rows * is->moe.top_k) * 4);
    a->logged += LOG_HEAD + rows * is->moe.top_k;
}

// Only this thread writes to the log, so room does not go away.
static int has_log_room(struct answers *a, int64_t num_ids) {
    pthread_mutex_lock(&a->notes);
    const int64_t end = a->logged + LOG_HEAD + num_ids;
    pthread_mutex_unlock(&a->notes);
    return end <= MAX_LOG;
}

static int answer_rows(struct answers *a, struct known *k, struct channel *c,
                       const uint8_t *message, const struct frame_head *request, int64_t came) {
    const struct answerable *is = &k->is;
    const int64_t started = now_ns(), rows = request->tensors[0].rows;
    const int64_t hidden = is->moe.gate.num_in, num_experts = is->num_experts;
    const int in_bytes = request->tensors[0].code == FRAME_INT8;
    const int has_loads = request->tensors[1].rows == 2, is_promised = request->body_size > 0;
    if (is->counts && !has_log_room(a, rows * is->moe.top_k)) return 0;
    struct desk d;
    uint8_t *scratch = scratch_of(a, lay_out_desk(&d, 0, is, request, a->threads));
    if (!scratch) return 0;
    lay_out_desk(&d, scratch, is, request, a->threads);
    const int64_t *basis = (const int64_t *)(message + request->tensors[1].start);
    if (!take_loads(is, has_loads ? basis + is->basis_size : 0, d.load)) return 0;

    // A copy: the sender could change it between checks and use.
    struct read_promises promised;
    memcpy(d.body, message + request->body_start, (size_t)request->body_size);
    if (is_promised && !read_promises(d.body, request->body_size, rows, &promised)) return 0;

    const uint8_t *sent = message + request->tensors[0].start;
    if (in_bytes) unpack_int8_rows((const int8_t *)sent, rows, hidden, d.rows);
    const float *x = in_bytes ? d.rows : (const float *)sent;
    choose_experts(&is->moe.gate, x, rows, is->moe.top_k, &is->moe.gating, d.logits, d.weights, d.ids,
                   a->threads);
    const int64_t gated = now_ns();
    if (is_promised) {
        memset(d.degraded, 0, (size_t)rows * 4);
        split_choices(d.ids, d.weights, rows, is->moe.top_k, &is->moe.substitution, &promised.is,
                      d.degraded, d.rest);
    }
    schedule_experts(d.ids, rows * is->moe.top_k, is->replicas, num_experts, is->num_workers,
                     is->live, is->weights, is->row, d.load, is->first, is->end, d.instance,
                     d.replica, d.of_choice, d.rest);
    int64_t own = 0, most = 0;
    for (int64_t n = 0; n < is->num_workers; n++) {
        int64_t count = 0;
        for (int64_t e = 0; e < num_experts; e++) count += d.instance[e] == n;
        if (count > most) most = count;
        if (n == is->worker) own = count;
    }
    const uint64_t digest = digest_of(&d, is, request, rows);
    const int64_t chosen = now_ns();

    struct frame_head reply = {.kind = FRAME_REPLY,
                               .num_tensors = 1 + has_loads + is_promised,
                               .layer = request->layer,
                               .threshold = 1,
                               .epoch = request->epoch,
                               .seq = request->seq,
                               .digest = digest};
    memcpy(reply.request_id, request->request_id, sizeof reply.request_id);
    reply.tensors[0] = request->tensors[0];  // sums travel as rows do
    if (!own) reply.tensors[0].rows = 0;
    if (has_loads)
        reply.tensors[1] = (struct tensor_place){FRAME_INT64, 1, (uint32_t)is->num_workers, 0};
    struct tensor_place *degraded = &reply.tensors[1 + has_loads];
    if (is_promised) *degraded = (struct tensor_place){FRAME_INT8, (uint32_t)rows, 1, 0};
    frame_lay_out(&reply);
    const int64_t size = frame_size(&reply);
    uint8_t *room = channel_room(c, size);
    uint8_t *to = room ? room : aligned_alloc(64, (size_t)rounded(size));
    if (!to) return 0;
    uint8_t *part = to + reply.tensors[0].start;
    if (own)
        experts(is->moe.slots, is->num_slots, x, rows, hidden, is->moe.size, d.weights, d.of_choice,
                is->moe.top_k, in_bytes ? d.sums : (float *)part, d.rest, a->threads);
    if (own && in_bytes) pack_int8_rows(d.sums, rows, hidden, (int8_t *)part);
    if (has_loads) memcpy(to + reply.tensors[1].start, d.load, (size_t)is->num_workers * 8);
    int8_t *counts = (int8_t *)(to + degraded->start);
    for (int64_t t = 0; is_promised && t < rows; t++) counts[t] = (int8_t)d.degraded[t];
    const int64_t computed = now_ns(), took = computed - started;
    reply.took_ns = took < UINT32_MAX ? (uint32_t)took : UINT32_MAX;
    frame_seal(to, &reply);
    if (room) {
        channel_commit(c, size);
    } else {
        channel_send(c, to, size);
        free(to);
    }
    const int64_t replied = now_ns();
    pthread_mutex_lock(&a->notes);
    k->asked_ns = started;
    note(a, is, &d, rows, own, most);
    if (own) take_sample(a, is, &d, rows, own, took);
    struct answer_tally *t = &a->tally;
    t->receive_ns += started - came, t->gate_ns += gated - started;
    t->choose_ns += chosen - gated, t->compute_ns += computed - chosen;
    t->reply_ns += replied - computed;
    pthread_mutex_unlock(&a->notes);
    return 1;
}

static int is_rows(const struct answerable *is, const uint8_t *message,
                   const struct frame_head *request) {
    const struct tensor_place *rows = &request->tensors[0], *basis = &request->tensors[1];
    const int64_t hidden = is->moe.gate.num_in;
    const int is_right = rows->code == FRAME_INT8 ? rows->cols == hidden + SCALE_BYTES
                                                  : rows->code == FRAME_FLOAT32 && rows->cols == hidden;
    return is_right && rows->rows &&
           basis->code == FRAME_INT64 && basis->cols == is->basis_size &&
           (basis->rows == 1 || basis->rows == 2) &&
           !memcmp(message + basis->start, is->basis, (size_t)is->basis_size * 8);
}

static int answer_ping(struct channel *c, const struct frame_head *ping) {
    struct frame_head pong = {.kind = FRAME_PONG, .threshold = 1, .seq = ping->seq};
    uint8_t bytes[128] __attribute__((aligned(64)));
    frame_lay_out(&pong);
    frame_seal(bytes, &pong);
    return channel_send(c, bytes, sizeof bytes) == 0;
}

int answer(struct answers *a, struct channel *c, const uint8_t *message, int64_t size) {
    struct frame_head head;
    const int64_t came = now_ns();
    if (frame_read(message, size, &a->limits, &head)) return 0;
    if (head.kind == FRAME_PING && !head.num_tensors) return answer_ping(c, &head);
    if (head.kind != FRAME_REQUEST || head.num_tensors != 2 ||
        head.flags != (head.body_size ? FRAME_PROMISED : 0))
        return 0;
    int done = 0;
    pthread_mutex_lock(&a->lock);
    for (struct known *k = *bucket_of(a, head.epoch, head.layer); k && !done; k = k->next)
        if (k->is.epoch == head.epoch && k->is.layer == head.layer &&
            is_rows(&k->is, message, &head)) {
            done = answer_rows(a, k, c, message, &head, came);
            break;
        }
    pthread_mutex_unlock(&a->lock);
    return done;
}
