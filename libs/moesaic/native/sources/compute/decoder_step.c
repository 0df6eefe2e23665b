// A step of a decoder, from tokens to logits, in one call: with few rows, the way between Python and its
// kernels takes a good part of the time that they compute.
#include "arena.h"
#include "compute/decoder_step.h"
#include "compute/matrix.h"

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t pass_bytes(const struct decoder *decoder, const struct whole_step *step) {
    return 3 * rounded(step->all.count * decoder->head.num_in * 4);  // x, delta, normed
}

int64_t pass_scratch(const struct decoder *decoder, const struct whole_step *step, int threads) {
    const int64_t count = step->all.count;
    // Keys and values, rounded rows; rows for the head.
    int64_t layer = count * (decoder->kv.num_out * 4 + linear_scratch(&decoder->kv)) + 128;
    layer = most(layer, count * linear_scratch(&decoder->head));
    for (int64_t i = 0; i < decoder->num_layers; i++)
        layer = most(layer, grouped_query_scratch(&decoder->layers[i].attention, &step->all, threads));
    const struct layer *last = &decoder->layers[decoder->num_layers - 1].attention;
    if (step->attending) layer = most(layer, grouped_query_scratch(last, &step->last, threads));
    return rounded(layer);
}

void pass_begin(struct pass *pass, uint8_t *memory) {
    const struct decoder *d = pass->decoder;
    const int64_t count = pass->step->all.count, hidden = d->head.num_in;
    struct arena arena = {memory};
    pass->x = take(&arena, count * hidden * 4);
    pass->delta = take(&arena, count * hidden * 4);
    pass->normed = take(&arena, count * hidden * 4);
    pass->rows = &pass->step->all, pass->layer = 0;
    look_up(&d->embedding, pass->step->tokens, count, pass->x, pass->threads);
    for (int64_t i = 0; i < count * hidden && d->embedding_multiplier != 1; i++)
        pass->x[i] *= d->embedding_multiplier;
}

// Writes the keys and values of all rows of the last layer; x += delta.
static void keep(const struct pass *pass, float *cache) {
    const struct decoder *d = pass->decoder;
    const struct step *s = pass->rows;
    const struct layer *l = &d->layers[d->num_layers - 1].attention;
    const float *delta = pass->layer ? pass->delta : 0;
    const int64_t count = s->count, hidden = d->kv.num_in, dim = s->shape.key_dim;
    const int64_t heads = d->kv.num_out == l->qkv.num_out ? s->shape.heads : 0;
    struct arena arena = {pass->scratch};
    float *kv = take(&arena, count * d->kv.num_out * 4);
    const float *qk_norm = l->qk_norm ? l->qk_norm + (s->shape.heads - heads) * dim : 0;
    add_rms_norm(pass->x, hidden, delta, l->norm, l->eps, count, hidden, pass->x, pass->normed,
                 pass->threads);
    linear(&d->kv, 1, pass->normed, hidden, 0, count, kv, d->kv.num_out, 0, arena.next,
           pass->threads);
    store_grouped(kv, count, heads, s->shape.kv_heads, dim, qk_norm, l->is_wide, l->eps, l->clip,
                  s->cos, s->sin, s->rotated, s->positions, s->interleaved, s->offsets, cache, s->shape.block_size,
                  s->shape.key_stride, pass->threads);
}

void pass_attend(struct pass *pass, float *const *caches) {
    const struct decoder *d = pass->decoder;
    const int64_t hidden = d->head.num_in, i = pass->layer;
    const float *added = i ? pass->delta : 0;
    if (pass->step->attending && i == d->num_layers - 1) {
        keep(pass, caches[i]);
        pass->rows = &pass->step->last;
        for (int64_t a = 0; a < pass->rows->count; a++)  // none comes from before its place
            memmove(pass->x + a * hidden, pass->x + pass->step->attending[a] * hidden,
                    (size_t)hidden * 4);
        added = 0;
    }
    grouped_query_layer(&d->layers[i].attention, pass->rows, pass->x, added, caches[i], pass->x,
                        pass->normed, pass->scratch, pass->threads);
    pass->layer++;
    *d->layers_done += 1;
}

void pass_end(struct pass *pass, float *logits) {
    const struct decoder *d = pass->decoder;
    const int64_t hidden = d->head.num_in, count = pass->rows->count;
    if (!logits) return;
    add_rms_norm(pass->x, hidden, pass->delta, d->norm, d->layers->attention.eps, count, hidden,
                 pass->x, pass->normed, pass->threads);
    linear(&d->head, 1, pass->normed, hidden, 0, count, logits, d->head.num_out, 0,
           pass->scratch, pass->threads);
}

static int64_t moe_bytes(const struct moe *m, int64_t count, int threads) {
    const int64_t chosen = count * (m->gate.num_out + 2 * m->top_k) * 4;
    return chosen + 64 +
           most(experts_scratch(count, m->top_k, m->gate.num_in, m->size, m->num_slots, threads),
                split_choices_scratch(m->gate.num_out));
}

EXPORT int64_t decoder_step_scratch(const struct decoder *decoder, const struct whole_step *step,
                                    int threads) {
    int64_t layer = pass_scratch(decoder, step, threads);
    for (int64_t i = 0; i < decoder->num_layers; i++)
        layer = most(layer, moe_bytes(&decoder->layers[i].moe, step->all.count, threads));
    return pass_bytes(decoder, step) + layer;
}

int32_t *degraded_in(const struct pass *pass) {
    return pass->rows->degraded + (pass->layer - 1) * pass->rows->count;
}

static void route(const struct moe *m, const struct pass *pass) {
    const int64_t count = pass->rows->count;
    struct arena arena = {pass->scratch};
    float *logits = take(&arena, count * (m->gate.num_out + 2 * m->top_k) * 4);
    float *weights = logits + count * m->gate.num_out;
    int32_t *ids = (int32_t *)(weights + count * m->top_k);
    choose_experts(&m->gate, pass->normed, count, m->top_k, &m->gating, logits, weights, ids,
                   pass->threads);
    if (pass->rows->promises)
        split_choices(ids, weights, count, m->top_k, &m->substitution, pass->rows->promises,
                      degraded_in(pass), arena.next);
    experts(m->slots, m->num_slots, pass->normed, count, m->gate.num_in, m->size, weights, ids,
            m->top_k, pass->delta, arena.next, pass->threads);
}

EXPORT void decoder_step(const struct decoder *decoder, const struct whole_step *step,
                         float *const *caches, float *logits, uint8_t *scratch, int threads) {
    struct pass pass = {.decoder = decoder,
                        .step = step,
                        .scratch = scratch + pass_bytes(decoder, step),
                        .threads = threads};
    pass_begin(&pass, scratch);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        pass_attend(&pass, caches);
        route(&decoder->layers[i].moe, &pass);
    }
    pass_end(&pass, logits);
}
