// The way of a step's rows through a decoder; between attention and the next layer lie the experts.
#ifndef MOESAIC_DECODER_STEP_H
#define MOESAIC_DECODER_STEP_H

#include "calls.h"

struct pass {
    const struct decoder *decoder;
    const struct whole_step *step;
    const struct step *rows;  // those that attend now
    int64_t layer;            // the next one
    float *x, *normed;        // [T, H]: the residual stream, and the input of the experts
    float *delta;             // [T, H]: their output
    uint8_t *scratch;         // of one pass at a time, and of what computes its experts
    int threads;
};

// Bytes that a pass keeps; its scratch comes on top, `pass_scratch` bytes.
int64_t pass_bytes(const struct decoder *decoder, const struct whole_step *step);
int64_t pass_scratch(const struct decoder *decoder, const struct whole_step *step, int threads);

// Looks up the embeddings. `memory` lies at a multiple of 64 bytes, as `pass->scratch` does.
void pass_begin(struct pass *pass, uint8_t *memory);

// Takes the experts of the layer before, if any, and computes attention and norms of the next one.
void pass_attend(struct pass *pass, float *const *caches);

// With promises: where choices are counted that are degraded, of the layer whose experts are asked for.
int32_t *degraded_in(const struct pass *pass);

// Takes the experts of the last layer, and computes the logits [A, vocab], if these are wanted.
void pass_end(struct pass *pass, float *logits);

#endif
