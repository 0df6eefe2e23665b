// Grouped-query attention from the residual stream to the MLP's input, in one call: with few rows, the
// way from Python to each of its pieces takes as long as they do.
#include "calls.h"

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Of the largest product, where rows are rounded.
static int64_t most_scratch(const struct layer *l, int64_t count) {
    const int64_t qkv = linear_scratch(&l->qkv), output = linear_scratch(&l->output);
    return rounded(count * (qkv > output ? qkv : output));
}

EXPORT int64_t grouped_query_scratch(const struct layer *layer, const struct step *step,
                                     int threads) {
    const int64_t wide = layer->qkv.num_out + layer->output.num_in + layer->output.num_out;
    return rounded(step->count * wide * 4) + most_scratch(layer, step->count) +
           attention_scratch(&step->shape, &step->batch, threads);
}

EXPORT void grouped_query_layer(const struct layer *layer, const struct step *step, const float *x,
                                const float *delta, float *cache, float *sum, float *out,
                                uint8_t *scratch, int threads) {
    const int64_t count = step->count, hidden = layer->qkv.num_in, dim = step->shape.key_dim;
    float *qkv = (float *)scratch, *attended = qkv + count * layer->qkv.num_out;
    float *projected = attended + count * layer->output.num_in;
    uint8_t *bytes = scratch + rounded((projected + count * layer->output.num_out - qkv) * 4);
    uint8_t *desks = bytes + most_scratch(layer, count);
    struct shape shape = step->shape;
    shape.window = layer->window, shape.sinks = layer->sinks;

    add_rms_norm(x, hidden, delta, layer->norm, layer->eps, count, hidden, sum, out, threads);
    linear(&layer->qkv, 1, out, hidden, 0, count, qkv, layer->qkv.num_out, 0, bytes, threads);
    store_grouped(qkv, count, step->shape.heads, step->shape.kv_heads, dim, layer->qk_norm,
                  layer->is_wide, layer->eps, layer->clip, step->cos, step->sin, step->rotated,
                  step->positions, step->interleaved, step->offsets, cache, step->shape.block_size,
                  step->shape.key_stride, threads);
    attention(&shape, &step->batch, qkv, cache, attended, desks, threads);
    linear(&layer->output, 1, attended, layer->output.num_in, 0, count, projected,
           layer->output.num_out, 0, bytes, threads);
    add_rms_norm(delta ? sum : x, hidden, projected, layer->norm_behind, layer->eps, count, hidden,
                 sum, out, threads);
}
