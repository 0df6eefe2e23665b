// A step of a decoder whose experts are all here, from tokens to logits, in one call: with few rows,
// the way between Python and its kernels takes a good part of the time that they compute.
#include "compute/arena.h"
#include "compute/matrix.h"

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t moe_bytes(const struct moe *m, int64_t count, int threads) {
    const int64_t chosen = count * (m->gate.num_out + 2 * m->top_k) * 4;
    return chosen + 64 +
           experts_scratch(count, m->top_k, m->gate.num_in, m->size, m->gate.num_out, threads);
}

EXPORT int64_t decoder_step_scratch(const struct decoder *decoder, const struct whole_step *step,
                                    int threads) {
    const int64_t count = step->all.count;
    // Keys and values, rounded rows.
    int64_t layer = count * (decoder->kv.num_out * 4 + decoder->kv.num_in + 8) + 128;
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const struct whole_layer *l = &decoder->layers[i];
        layer = most(layer, grouped_query_scratch(&l->attention, &step->all, threads));
        layer = most(layer, moe_bytes(&l->moe, count, threads));
    }
    const struct layer *last = &decoder->layers[decoder->num_layers - 1].attention;
    if (step->attending) layer = most(layer, grouped_query_scratch(last, &step->last, threads));
    return 3 * (count * decoder->head.num_in * 4 + 64) + layer;  // x, delta, normed
}

static void route(const struct moe *m, const float *x, int64_t count, float *out, uint8_t *scratch,
                  int threads) {
    struct arena arena = {scratch};
    float *logits = take(&arena, count * (m->gate.num_out + 2 * m->top_k) * 4);
    float *weights = logits + count * m->gate.num_out;
    int32_t *ids = (int32_t *)(weights + count * m->top_k);
    choose_experts(&m->gate, x, count, m->top_k, m->normalise, m->scaling, logits, weights, ids,
                   threads);
    experts(m->slots, m->gate.num_out, x, count, m->gate.num_in, m->size, weights, ids, m->top_k,
            out, arena.next, threads);
}

// Writes the keys and values of all rows of the last layer; x += delta.
static void keep(const struct decoder *d, const struct step *s, float *x, const float *delta,
                 float *normed, float *cache, uint8_t *scratch, int threads) {
    const struct layer *l = &d->layers[d->num_layers - 1].attention;
    const int64_t count = s->count, hidden = d->kv.num_in, dim = s->shape.key_dim;
    const int64_t heads = d->kv.num_out == l->qkv.num_out ? s->shape.heads : 0;
    struct arena arena = {scratch};
    float *kv = take(&arena, count * d->kv.num_out * 4);
    const float *qk_norm = l->qk_norm ? l->qk_norm + (s->shape.heads - heads) * dim : 0;
    add_rms_norm(x, hidden, delta, l->norm, l->eps, count, hidden, x, normed, threads);
    linear(&d->kv, 1, normed, hidden, 0, count, kv, d->kv.num_out, 0, arena.next, threads);
    store_grouped(kv, count, heads, s->shape.kv_heads, dim, qk_norm, l->eps, s->cos, s->sin,
                  s->positions, s->interleaved, s->offsets, cache, s->shape.block_size,
                  s->shape.key_stride, threads);
}

EXPORT void decoder_step(const struct decoder *decoder, const struct whole_step *step,
                         float *const *caches, float *logits, uint8_t *scratch, int threads) {
    const int64_t hidden = decoder->head.num_in, bytes = step->all.count * hidden * 4;
    struct arena arena = {scratch};
    float *x = take(&arena, bytes), *delta = take(&arena, bytes), *normed = take(&arena, bytes);
    const struct step *rows = &step->all;
    for (int64_t t = 0; t < rows->count; t++)
        memcpy(x + t * hidden, decoder->embedding + step->tokens[t] * hidden, (size_t)hidden * 4);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const struct whole_layer *l = &decoder->layers[i];
        const float *added = i ? delta : 0;
        if (step->attending && i == decoder->num_layers - 1) {
            keep(decoder, rows, x, added, normed, caches[i], arena.next, threads);
            rows = &step->last;
            for (int64_t a = 0; a < rows->count; a++)  // none comes from before its place
                memmove(x + a * hidden, x + step->attending[a] * hidden, (size_t)hidden * 4);
            added = 0;
        }
        grouped_query_layer(&l->attention, rows, x, added, caches[i], x, normed, arena.next,
                            threads);
        route(&l->moe, normed, rows->count, delta, arena.next, threads);
        *decoder->layers_done += 1;
    }
    if (!logits) return;
    add_rms_norm(x, hidden, delta, decoder->norm, decoder->layers->attention.eps, rows->count,
                 hidden, x, normed, threads);
    linear(&decoder->head, 1, normed, hidden, 0, rows->count, logits, decoder->head.num_out, 0, 0,
           threads);
}
