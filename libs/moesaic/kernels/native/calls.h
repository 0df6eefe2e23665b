// What Python calls piece by piece, and a layer as a whole calls at once.
#ifndef MOESAIC_CALLS_H
#define MOESAIC_CALLS_H

#include "attention.h"

EXPORT void linear(const struct matrix *matrices, int64_t heads, const float *x, int64_t x_stride,
                   int64_t x_head_stride, int64_t count, float *out, int64_t out_stride,
                   int64_t out_head_stride, uint8_t *scratch, int threads);
EXPORT void add_rms_norm(const float *x, int64_t x_stride, const float *delta, const float *weight,
                         float eps, int64_t count, int64_t size, float *sum, float *out,
                         int threads);
EXPORT void store_grouped(float *qkv, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
                          const float *qk_norm, float eps, const float *cos, const float *sin,
                          int interleaved, const int64_t *slots, float *cache, int64_t block_size,
                          int64_t key_stride, int threads);
EXPORT int64_t attention_scratch(const struct shape *s, const struct batch *batch, int threads);
EXPORT void attention(const struct shape *s, const struct batch *batch, const float *queries,
                      const float *cache, float *out, uint8_t *scratch, int threads);

#endif
