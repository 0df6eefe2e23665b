// What Python calls piece by piece, and a layer as a whole calls at once.
#ifndef MOESAIC_CALLS_H
#define MOESAIC_CALLS_H

#include "attention.h"

// What lies behind one another in a scratch.
struct arena {
    uint8_t *next;
};
INLINE void *take(struct arena *arena, int64_t bytes) {
    void *taken = arena->next;
    arena->next += (bytes + 63) / 64 * 64;
    return taken;
}

struct expert {
    struct matrix gate_up;  // H -> 2I, each panel: half of it gate, half of it up
    struct matrix down;     // I -> H
};

// Attention between two norms.
struct layer {
    struct matrix qkv, output;
    const float *norm;         // [H], before attention
    const float *qk_norm;      // [heads + kv_heads, dim] or none
    const float *norm_behind;  // [H]
    float eps;
};

// What all layers are told of the rows of a step.
struct step {
    const float *cos, *sin;    // [T, dim]; or, with `positions` [T], of all positions
    const int64_t *positions;  // or none
    const int64_t *slots;      // [T]; none: nothing is written
    struct shape shape;
    struct batch batch;
    int64_t count;  // T
    int32_t interleaved;
};

EXPORT void linear(const struct matrix *matrices, int64_t heads, const float *x, int64_t x_stride,
                   int64_t x_head_stride, int64_t count, float *out, int64_t out_stride,
                   int64_t out_head_stride, uint8_t *scratch, int threads);
EXPORT void add_rms_norm(const float *x, int64_t x_stride, const float *delta, const float *weight,
                         float eps, int64_t count, int64_t size, float *sum, float *out,
                         int threads);
EXPORT void store_grouped(float *qkv, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
                          const float *qk_norm, float eps, const float *cos, const float *sin,
                          const int64_t *positions, int interleaved, const int64_t *slots,
                          float *cache, int64_t block_size, int64_t key_stride, int threads);
EXPORT int64_t attention_scratch(const struct shape *s, const struct batch *batch, int threads);
EXPORT void attention(const struct shape *s, const struct batch *batch, const float *queries,
                      const float *cache, float *out, uint8_t *scratch, int threads);
EXPORT int64_t grouped_query_scratch(const struct layer *l, const struct step *s, int threads);
EXPORT void grouped_query_layer(const struct layer *l, const struct step *s, const float *x,
                                const float *delta, float *cache, float *sum, float *out,
                                uint8_t *scratch, int threads);
EXPORT void choose_experts(const struct matrix *gate, const float *x, int64_t count, int64_t top_k,
                           int normalise, float scaling, float *logits, float *weights,
                           int32_t *ids, int threads);
EXPORT int64_t experts_scratch(int64_t rows, int64_t top_k, int64_t hidden, int64_t size,
                               int64_t num_slots, int threads);
EXPORT void experts(const struct expert *const *slots, int64_t num_slots, const float *x,
                    int64_t num_rows, int64_t hidden, int64_t size, const float *weights,
                    const int32_t *slot_ids, int64_t top_k, float *out, uint8_t *scratch,
                    int threads);

#endif
