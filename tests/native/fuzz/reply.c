// The answer that a layer owes to a request, step by step.
#include <stdlib.h>
#include <string.h>

#include "layer.h"

// The experts of the rows of a request, and their workers.
struct choice {
    float *logits, *weights;
    int32_t *ids, *instance, *replica, *of_choice, *degraded;
    int64_t *load;
};

// Gives choices to united experts as a body promises it.
static void split_plainly(const struct answerable *is, const uint8_t *body, int64_t rows,
                          struct choice *c) {
    int32_t num_levels, thresholds[255], phases[255];
    memcpy(&num_levels, body, 4);
    for (int32_t l = 0; l < num_levels; l++) {
        memcpy(&thresholds[l], body + 4 + 8 * l, 4);
        memcpy(&phases[l], body + 8 + 8 * l, 4);
    }
    const struct promises promises = {thresholds, phases,
                                      num_levels > 1 ? body + 4 + 8 * num_levels : 0, num_levels};
    uint8_t *scratch = exact(split_choices_scratch(is->moe.substitution.num_experts));
    split_choices(c->ids, c->weights, rows, is->moe.top_k, &is->moe.substitution, &promises,
                  c->degraded, scratch);
    free(scratch);
}

static struct choice choose_plainly(const struct answerable *is, const float *x, int64_t rows,
                                    const int64_t *loads, const uint8_t *body, int threads) {
    const int64_t num_own = is->moe.gate.num_out, chosen = rows * is->moe.top_k;
    const int64_t num_experts = is->num_experts;
    struct choice c = {exact(rows * num_own * 4), exact(chosen * 4),
                       exact(chosen * 4),         exact(num_experts * 4),
                       exact(num_experts * 4),    exact(chosen * 4),
                       exact(rows * 4),           exact(is->num_workers * 8)};
    memset(c.degraded, 0, (size_t)rows * 4);
    uint8_t *scratch = exact(schedule_experts_scratch(num_experts, is->num_workers));
    memset(c.load, 0, (size_t)is->num_workers * 8);
    for (int64_t i = 1; i < is->basis_size && loads; i++) c.load[is->basis[i]] = loads[i];
    choose_experts(&is->moe.gate, x, rows, is->moe.top_k, &is->moe.gating, c.logits, c.weights, c.ids,
                   threads);
    if (body) split_plainly(is, body, rows, &c);
    schedule_experts(c.ids, chosen, is->replicas, num_experts, is->num_workers, is->live,
                     is->weights, is->row, c.load, is->first, is->end, c.instance, c.replica,
                     c.of_choice, scratch);
    free(scratch);
    return c;
}

static void free_choice(struct choice *c) {
    free(c->logits), free(c->weights), free(c->ids), free(c->instance);
    free(c->replica), free(c->of_choice), free(c->degraded), free(c->load);
}

static uint8_t *put(uint8_t *to, const void *from, int64_t bytes) {
    memcpy(to, from, (size_t)bytes);
    return to + bytes;
}

// See moesaic.experts.assignment.decision_digest.
static uint64_t digest_of(const struct answerable *is, const struct frame_head *request,
                          const struct choice *c, int64_t rows) {
    const int64_t shape[3] = {rows, is->moe.top_k, is->num_experts}, layer = request->layer;
    const int64_t chosen = rows * is->moe.top_k * 4, served = is->num_experts * 4;
    const double threshold = request->threshold;
    const uint8_t axes = 3;
    uint8_t *decision = exact(49 + chosen + served), *at = decision;
    at = put(at, &request->epoch, 8), at = put(at, &layer, 8), at = put(at, &threshold, 8);
    at = put(at, &axes, 1), at = put(at, shape, 24);
    at = put(at, c->ids, chosen), at = put(at, c->instance, served);
    const uint64_t digest = checksum_of(decision, at - decision, 0);
    free(decision);
    return digest;
}

static float *sums_of(const struct answerable *is, const float *x, int64_t rows,
                      const struct choice *c, int threads) {
    const int64_t hidden = is->moe.gate.num_in;
    float *sums = exact(rows * hidden * 4);
    uint8_t *scratch = exact(experts_scratch(rows, is->moe.top_k, hidden, is->moe.size,
                                             is->num_slots, threads));
    experts(is->moe.slots, is->num_slots, x, rows, hidden, is->moe.size, c->weights, c->of_choice,
            is->moe.top_k, sums, scratch, threads);
    free(scratch);
    return sums;
}

struct message reply_of(const struct layer_here *layer, const uint8_t *message,
                        const struct frame_head *request, int threads) {
    const struct answerable *is = &layer->is;
    const int64_t rows = request->tensors[0].rows, hidden = is->moe.gate.num_in;
    const int in_bytes = request->tensors[0].code == FRAME_INT8;
    const int has_loads = request->tensors[1].rows == 2, is_promised = request->flags != 0;
    const uint8_t *came = message + request->tensors[0].start;
    const int64_t *basis = (const int64_t *)(message + request->tensors[1].start);
    float *x = exact_copy(came, in_bytes ? 0 : rows * hidden * 4);
    if (in_bytes) {
        free(x), x = exact(rows * hidden * 4);
        unpack_int8_rows((const int8_t *)came, rows, hidden, x);
    }
    struct choice c =
        choose_plainly(is, x, rows, has_loads ? basis + is->basis_size : 0,
                       is_promised ? message + request->body_start : 0, threads);
    int own = 0;
    for (int64_t e = 0; e < is->num_experts; e++) own |= c.instance[e] == is->worker;
    struct frame_head reply = {.kind = FRAME_REPLY,
                               .num_tensors = 1 + has_loads + is_promised,
                               .layer = request->layer,
                               .threshold = 1,
                               .epoch = request->epoch,
                               .seq = request->seq,
                               .digest = digest_of(is, request, &c, rows)};
    memcpy(reply.request_id, request->request_id, sizeof reply.request_id);
    reply.tensors[0] = request->tensors[0];
    if (!own) reply.tensors[0].rows = 0;
    reply.tensors[1] = (struct tensor_place){FRAME_INT64, 1, (uint32_t)is->num_workers, 0};
    struct tensor_place *degraded = &reply.tensors[1 + has_loads];
    if (is_promised) *degraded = (struct tensor_place){FRAME_INT8, (uint32_t)rows, 1, 0};
    struct message m = frame_of(&reply);
    if (own) {
        float *sums = sums_of(is, x, rows, &c, threads);
        uint8_t *to = m.bytes + reply.tensors[0].start;
        if (in_bytes)
            pack_int8_rows(sums, rows, hidden, (int8_t *)to);
        else
            memcpy(to, sums, (size_t)(rows * hidden) * 4);
        free(sums);
    }
    if (has_loads) memcpy(m.bytes + reply.tensors[1].start, c.load, (size_t)is->num_workers * 8);
    for (int64_t t = 0; is_promised && t < rows; t++)
        m.bytes[degraded->start + t] = (uint8_t)c.degraded[t];
    frame_seal(m.bytes, &reply);
    free(x), free_choice(&c);
    return m;
}
