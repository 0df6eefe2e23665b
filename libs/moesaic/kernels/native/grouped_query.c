// Grouped-query attention from the residual stream to the MLP's input, in one call: of few rows, the
// way from Python to each of its pieces takes as long as they do.
#include "calls.h"

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Of the largest product, for int8.
static int64_t linear_scratch(const struct layer *l, int64_t count) {
    const int64_t in = l->qkv.in > l->output.in ? l->qkv.in : l->output.in;
    return rounded(count * (in + 8));
}

// Bytes of `scratch` that `grouped_query_layer` needs.
EXPORT int64_t grouped_query_scratch(const struct layer *l, const struct step *s, int threads) {
    const int64_t wide = l->qkv.out + l->output.in + l->output.out;
    return rounded(s->count * wide * 4) + linear_scratch(l, s->count) +
           attention_scratch(&s->shape, &s->batch, threads);
}

// sum = x + delta (if any) + attention of its norm [T, H], out = the norm of that. What the rows
// cache is written to `cache`.
EXPORT void grouped_query_layer(const struct layer *l, const struct step *s, const float *x,
                                const float *delta, float *cache, float *sum, float *out,
                                uint8_t *scratch, int threads) {
    const int64_t count = s->count, hidden = l->qkv.in, dim = s->shape.key_dim;
    float *qkv = (float *)scratch, *attended = qkv + count * l->qkv.out;
    float *projected = attended + count * l->output.in;
    uint8_t *bytes = scratch + rounded((projected + count * l->output.out - qkv) * 4);
    uint8_t *desks = bytes + linear_scratch(l, count);

    add_rms_norm(x, hidden, delta, l->norm, l->eps, count, hidden, sum, out, threads);
    linear(&l->qkv, 1, out, hidden, 0, count, qkv, l->qkv.out, 0, bytes, threads);
    store_grouped(qkv, count, s->shape.heads, s->shape.kv_heads, dim, l->qk_norm, l->eps, s->cos,
                  s->sin, s->positions, s->interleaved, s->slots, cache, s->shape.block_size,
                  s->shape.key_stride, threads);
    attention(&s->shape, &s->batch, qkv, cache, attended, desks, threads);
    linear(&l->output, 1, attended, l->output.in, 0, count, projected, l->output.out, 0, bytes,
           threads);
    add_rms_norm(delta ? sum : x, hidden, projected, l->norm_behind, l->eps, count, hidden, sum,
                 out, threads);
}
