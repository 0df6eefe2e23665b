// A step of a decoder whose experts are all here, from tokens to logits, in one call: of few rows, the
// way between Python and its kernels takes a good part of what they compute.
#include "calls.h"

// The routed experts of a layer.
struct moe {
    struct matrix gate;                 // H -> E
    const struct expert *const *slots;  // [E]
    int64_t size, top_k;                // I, k
    float scaling;
    int32_t normalise;
};

struct whole_layer {
    struct layer attention;
    struct moe moe;
};

struct decoder {
    const struct whole_layer *layers;
    int64_t num_layers;
    struct matrix kv;        // the last layer's: H -> 2 kv_heads d, or all of its qkv
    const float *embedding;  // [vocab, H]
    const float *norm;       // [H]
    struct matrix head;      // H -> vocab
    volatile int64_t *layers_done;  // counts up; others look at it meanwhile
};

struct whole_step {
    struct step all;
    const int64_t *tokens;     // [T]
    const int64_t *attending;  // [A], ascending: the rows that attend in the last layer; none: all
    struct step last;          // of these; they write nothing there
};

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t moe_bytes(const struct moe *m, int64_t count, int threads) {
    const int64_t chosen = count * (m->gate.out + 2 * m->top_k) * 4;
    return chosen + 64 + experts_scratch(count, m->top_k, m->gate.in, m->size, m->gate.out, threads);
}

// Bytes of `scratch` that `decoder_step` needs.
EXPORT int64_t decoder_step_scratch(const struct decoder *d, const struct whole_step *s,
                                    int threads) {
    const int64_t count = s->all.count;
    int64_t layer = count * (d->kv.out * 4 + d->kv.in + 8) + 128;  // keys and values, rounded rows
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct whole_layer *l = &d->layers[i];
        layer = most(layer, grouped_query_scratch(&l->attention, &s->all, threads));
        layer = most(layer, moe_bytes(&l->moe, count, threads));
    }
    const struct layer *last = &d->layers[d->num_layers - 1].attention;
    if (s->attending) layer = most(layer, grouped_query_scratch(last, &s->last, threads));
    return 3 * (count * d->head.in * 4 + 64) + layer;  // x, delta, normed
}

static void route(const struct moe *m, const float *x, int64_t count, float *out, uint8_t *scratch,
                  int threads) {
    struct arena arena = {scratch};
    float *logits = take(&arena, count * (m->gate.out + 2 * m->top_k) * 4);
    float *weights = logits + count * m->gate.out;
    int32_t *ids = (int32_t *)(weights + count * m->top_k);
    choose_experts(&m->gate, x, count, m->top_k, m->normalise, m->scaling, logits, weights, ids,
                   threads);
    experts(m->slots, m->gate.out, x, count, m->gate.in, m->size, weights, ids, m->top_k, out,
            arena.next, threads);
}

// Writes the keys and values of all rows of the last layer; x += delta.
static void keep(const struct decoder *d, const struct step *s, float *x, const float *delta,
                 float *normed, float *cache, uint8_t *scratch, int threads) {
    const struct layer *l = &d->layers[d->num_layers - 1].attention;
    const int64_t count = s->count, hidden = d->kv.in, dim = s->shape.key_dim;
    const int64_t heads = d->kv.out == l->qkv.out ? s->shape.heads : 0;
    struct arena arena = {scratch};
    float *kv = take(&arena, count * d->kv.out * 4);
    const float *qk_norm = l->qk_norm ? l->qk_norm + (s->shape.heads - heads) * dim : 0;
    add_rms_norm(x, hidden, delta, l->norm, l->eps, count, hidden, x, normed, threads);
    linear(&d->kv, 1, normed, hidden, 0, count, kv, d->kv.out, 0, arena.next, threads);
    store_grouped(kv, count, heads, s->shape.kv_heads, dim, qk_norm, l->eps, s->cos, s->sin,
                  s->positions, s->interleaved, s->slots, cache, s->shape.block_size,
                  s->shape.key_stride, threads);
}

// What the rows cache is written to `caches`, one for each layer; the logits [A, vocab] of those that
// attend in the last layer to `logits`, if any are wanted.
EXPORT void decoder_step(const struct decoder *d, const struct whole_step *s, float *const *caches,
                         float *logits, uint8_t *scratch, int threads) {
    const int64_t hidden = d->head.in, bytes = s->all.count * hidden * 4;
    struct arena arena = {scratch};
    float *x = take(&arena, bytes), *delta = take(&arena, bytes), *normed = take(&arena, bytes);
    const struct step *rows = &s->all;
    for (int64_t t = 0; t < rows->count; t++)
        memcpy(x + t * hidden, d->embedding + s->tokens[t] * hidden, (size_t)hidden * 4);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct whole_layer *l = &d->layers[i];
        const float *added = i ? delta : 0;
        if (s->attending && i == d->num_layers - 1) {
            keep(d, rows, x, added, normed, caches[i], arena.next, threads);
            rows = &s->last;
            for (int64_t a = 0; a < rows->count; a++)  // none comes from before its place
                memmove(x + a * hidden, x + s->attending[a] * hidden, (size_t)hidden * 4);
            added = 0;
        }
        grouped_query_layer(&l->attention, rows, x, added, caches[i], x, normed, arena.next,
                            threads);
        route(&l->moe, normed, rows->count, delta, arena.next, threads);
        *d->layers_done += 1;
    }
    if (!logits) return;
    add_rms_norm(x, hidden, delta, d->norm, d->layers->attention.eps, rows->count, hidden, x,
                 normed, threads);
    linear(&d->head, 1, normed, hidden, 0, rows->count, logits, d->head.out, 0, 0, threads);
}
