// Several layers of a decoder one after the other, experts included, in one call: of few rows, the way
// between Python and two calls a layer takes as long as a third of what they compute.
#include "calls.h"

// The routed experts of a layer, all of them here.
struct moe {
    struct matrix gate;  // H -> E
    const struct expert *const *slots;  // [E]
    int64_t size, top_k;                // I, k
    float scaling;
    int32_t normalise;
};

struct whole_layer {
    struct layer attention;
    struct moe moe;
};

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t choice_bytes(const struct moe *m, int64_t count) {
    return rounded(count * (m->gate.out + 2 * m->top_k) * 4);
}

// Bytes of `scratch` that `decoder_layers` needs.
EXPORT int64_t decoder_layers_scratch(const struct whole_layer *layers, int64_t num_layers,
                                      const struct step *s, int threads) {
    int64_t bytes = 0;
    for (const struct whole_layer *l = layers; l < layers + num_layers; l++) {
        const struct moe *m = &l->moe;
        bytes = most(bytes, grouped_query_scratch(&l->attention, s, threads));
        bytes = most(bytes, choice_bytes(m, s->count) +
                                experts_scratch(s->count, m->top_k, m->gate.in, m->size,
                                                m->gate.out, threads));
    }
    return rounded(s->count * layers->attention.qkv.in * 4) + bytes;
}

// x [T, H], what goes into the first layer, becomes the residual stream behind the last, less what its
// experts add to it: delta [T, H]. What the rows cache is written to `caches`, one for each layer.
EXPORT void decoder_layers(const struct whole_layer *layers, int64_t num_layers,
                           const struct step *s, float *const *caches, float *x, float *delta,
                           uint8_t *scratch, int threads) {
    const int64_t count = s->count, hidden = layers->attention.qkv.in;
    float *normed = (float *)scratch;
    uint8_t *rest = scratch + rounded(count * hidden * 4);
    for (int64_t i = 0; i < num_layers; i++) {
        const struct moe *m = &layers[i].moe;
        float *logits = (float *)rest, *weights = logits + count * m->gate.out;
        int32_t *ids = (int32_t *)(weights + count * m->top_k);
        grouped_query_layer(&layers[i].attention, s, x, i ? delta : 0, caches[i], x, normed, rest,
                            threads);
        choose_experts(&m->gate, normed, count, m->top_k, m->normalise, m->scaling, logits, weights,
                       ids, threads);
        experts(m->slots, m->gate.out, normed, count, hidden, m->size, weights, ids, m->top_k,
                delta, rest + choice_bytes(m, count), threads);
    }
}
