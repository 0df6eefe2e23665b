// All that Python calls, and the structs that it fills. header.py reads both from here, and every
// definition is compiled against it: no order and no type is written twice.
//   Form     one declaration a statement; a pointer that may be NULL says "or none".
#ifndef MOESAIC_CALLS_H
#define MOESAIC_CALLS_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

// A packed matrix: x [rows, num_in] -> [rows, num_out]. P panels, see matrix.h.
struct matrix {
    const void *panels;      // of 32 or 16 bits [P][num_in][PANEL], int8 [P][in4][PANEL][4],
                             // int4 [P][in32][4][PANEL][4], fp8 [P][num_in][PANEL]
    const float *bias;       // [P * PANEL] or none
    const float *scales;     // [P * PANEL]: of int8, and of int4's scales
    const int32_t *offsets;  // [P * PANEL], of int8: what ZERO adds to each sum, where x is around it
    const void *group_scales;  // [P][groups][PANEL]: float16 of int4, float of fp8
    const uint16_t *zeros;     // [P][groups][PANEL], float16, of int4; or none: all are `zero`
    const uint8_t *levels;     // [16], of int4: of each code, up to 24; or none: codes are levels
    int64_t num_in, num_out;
    int64_t form;   // float32, bfloat16, float16, int8, int4, fp8
    int64_t group;  // inputs that share a scale; of int4 a multiple of 32, or all
    int64_t zero;   // the level that stands for 0
};

struct expert {
    struct matrix gate_up;  // H -> 2I, each panel: half of it gate, half of it up
    struct matrix down;     // I -> H
    float slope, limit;     // limit 0: silu(gate) * up; else as `Clamped` in packed_experts.py
};

// The sequences of a step, as the planner has them.
struct batch {
    const int32_t *first_rows, *num_rows, *lengths, *block_tables;
    int64_t count, table_width;
};

// The place of heads in the queries and in the cache.
struct shape {
    int64_t heads, kv_heads;
    int64_t key_dim, value_dim;
    // In the cache, in floats. A key_stride other than 1: of a block, a head's keys lie dimension by
    // dimension, LANES tokens and more of it side by side.
    int64_t block_stride, head_stride, token_stride, key_stride, value_start, value_stride;
    int64_t block_size, window;        // window 0: none; of a step, each layer's own counts
    int64_t query_stride, out_stride;  // between rows
    float scale;
    const float *sinks;  // [heads]: a logit in each softmax's sum that weighs no value; or none. As the window
};

// Attention between two norms.
struct layer {
    struct matrix qkv, output;
    const float *norm;         // [H], before attention
    const float *qk_norm;      // [heads + kv_heads, dim] or none
    const float *norm_behind;  // [H]
    int64_t window;            // 0: none
    const float *sinks;        // [heads] or none
    float eps;
    float clip;       // see store_grouped
    int32_t is_wide;  // `qk_norm`
};

// A simulated fleet of edge servers; moesaic_lab.simulation.edge.state says what each is.
struct edge_state {
    int64_t num_sites, num_gpus, num_layers, num_experts, num_requests, top_k, running, num_answers;
    const int32_t *first_gpu, *site_of, *holder;
    const int64_t *offsets;
    const int32_t *experts, *rows, *tokens;
    const double *at_s;
    const int32_t *site, *prompt, *answers, *pool, *start;
    const double *costs, *byte_s;
    double *gpu_free_s, *link_free_s, *gpu_busy_s, *link_busy_s;
    int32_t *members, *num_members, *layer, *pending;
    double *attention_s, *done_s;
    int32_t *first_waiting, *last_waiting, *next_waiting, *passes;
    double *begun_s, *first_s, *end_s;
    int64_t *local, *remote, *messages;
    void *heap;
    int64_t *control;
};

// Promises to the rows of a batch, see moesaic.brownout.split.
struct promises {
    const int32_t *thresholds;    // [num_levels], in parts of 10,000
    const int32_t *phases;        // [num_levels]
    const uint8_t *level_of_row;  // [T]; or none: all have level 0
    int64_t num_levels;
};

// What is done with the choices of a layer that are not kept.
struct substitution {
    int64_t num_experts;   // of the layer: E
    int64_t way;           // experts of one group; 0: there are no united experts
    const uint8_t *lost;   // [E]: 1: nobody can serve it now; or none
    const int32_t *homes;  // [E], each in 0..E-1: the instance that has it; or none: all are in one place
    int32_t instead;       // 0: united experts, 1: a row's other experts, 2: nobody
};

// The rows of a step, for all layers.
struct step {
    const float *cos, *sin;    // [T, rotated]; or, with `positions` [T], of all positions
    int64_t rotated;
    const int64_t *positions;  // or none
    const int64_t *offsets;    // [T]: where in the cache; or none: nothing is written
    struct shape shape;
    struct batch batch;
    int64_t count;  // T
    int32_t interleaved;
    const struct promises *promises;  // or none: every choice is served by its own expert
    int32_t *degraded;                // [num_layers, T], with promises: choices that are not are added
};

// How a gate chooses among experts 0..E-1 by their scores.
struct gating {
    const float *correction;  // [E]: added to scores where experts are chosen, not to weights; or none
    int64_t num_groups;       // experts fall into groups of equal size, in order
    int64_t kept_groups;      // a row's experts come from so many
    int64_t group_best;       // the best so many of a group, 1 or 2, together make its score
    float scaling;            // of the weights
    float epsilon, least;     // of the sum that divides them: what is added to it; its least value
    int32_t normalise;        // weights are divided by their sum
    int32_t sigmoid;          // scores are sigmoids, not softmax
};

// The routed experts of a layer.
struct moe {
    struct matrix gate;                 // H -> E
    const struct expert *const *slots;  // [num_slots]; of whole steps: experts 0..E-1, then united ones
    int64_t num_slots;
    int64_t size, top_k;                // I, k
    struct substitution substitution;
    struct gating gating;
};

struct whole_layer {
    struct layer attention;
    struct moe moe;
};

struct decoder {
    const struct whole_layer *layers;
    int64_t num_layers;
    struct matrix kv;        // the last layer's: H -> 2 kv_heads d, or all of its qkv
    struct matrix embedding;  // vocab outputs of H inputs each; its rows are looked up
    float embedding_multiplier;
    const float *norm;        // [H]
    struct matrix head;      // H -> vocab
    volatile int64_t *layers_done;  // counts up; other threads read it meanwhile
};

struct whole_step {
    struct step all;
    const int64_t *tokens;     // [T]
    const int64_t *attending;  // [A], ascending: the rows that attend in the last layer; or none: all
    struct step last;          // of these; they write nothing there
};

// One layer of one epoch that can be answered without Python, for one basis of assignment.
struct answerable {
    uint64_t epoch;
    int64_t layer;
    const int64_t *basis;  // [basis_size]: the policy's code, then the live workers
    int64_t basis_size;
    struct moe moe;  // `slots` are [num_slots] here
    int64_t num_slots;
    int64_t num_experts;                 // the gate's and united ones: E
    const int32_t *replicas;             // [E, N]
    int64_t num_workers, worker;         // N, and the index of this one
    const uint8_t *live;                 // [N]
    const int64_t *weights, *row;        // [N]: costs, see schedule_experts
    int32_t first, end;                  // this worker's replicas
    int32_t counts;                      // of all workers that see a batch, this one counts it
};

// What was answered since the last look.
struct answer_tally {
    int64_t batches, rows, experts, most_experts;
    // Batches by their number of experts: 0, 1, 2, up to 4, 8, 16, 32, 64, 128, more.
    int64_t up_to_0, up_to_1, up_to_2, up_to_4, up_to_8, up_to_16, up_to_32, up_to_64, up_to_128;
    int64_t up_to_any;
    int64_t receive_ns, gate_ns, choose_ns, compute_ns, reply_ns;
};

// One layer of one route.
struct ask {
    void *const *channels;  // [num]
    int64_t num;
    const int64_t *order;    // [num]: in which replies are added up
    const int64_t *node_of;  // [num]: the node of each, in that order
    int64_t num_workers;     // of the placement: N
    uint64_t epoch;
    int64_t layer, hidden;
    int64_t max_rows, max_cols, max_bytes;  // of a reply
    int64_t code;          // of rows and sums, as in frames: float32, bfloat16, or int8 [T, H + 4]
    const int64_t *basis;  // [basis_size]: the policy's code, then the live workers
    int64_t basis_size;
    // Where the policy counts work that is under way: the mean loads of past batches, 1 if there are
    // any.
    double *usual;   // [N], or none
    int64_t *known;  // [1]
    int64_t *took_ns;  // [num], or none: what each worker says that it took to compute is added
};

// One batch.
struct asked {
    uint64_t id_low, id_high;  // of the step
    uint64_t seq;              // of the first call; the others follow
    const void *rows;          // [count, H], bfloat16 if they travel so, else float32
    const int64_t *basis;      // [basis_rows, basis_size]
    int64_t count, basis_rows, basis_size;
    float *out, *node_sum;  // [count, H]; the latter for several nodes
    int64_t *loads;         // [N], where the basis has loads
    int64_t deadline_ns;
    // Channels whose peers are answered meanwhile, if they only ask whether this side is there.
    void *const *others;  // [num_others]
    int64_t num_others;
    int64_t send_ns, wait_ns, sum_ns;  // out
    int64_t slowest_ns;  // out: what the slowest worker says that it took to compute
    const struct promises *promises;  // or none: rows are promised everything
    int32_t *degraded;                // [count], with promises: choices that are degraded are added
};

// One part of a step whose experts are in other processes.
struct part {
    struct whole_step step;
    float *logits;  // [A, vocab] of the rows that attend in the last layer, or none
    // The exchange that was left to Python, where the step failed.
    int64_t layer;  // -1: none
    uint64_t seq;
    int64_t deadline_ns;
};

// All layers of one route, and what the exchanges of one step have in common.
struct apart {
    const struct ask *asks;  // [num_layers]
    uint64_t id_low, id_high;  // of the step
    uint64_t seq;              // in: of the first call; out: of the next step's
    int64_t patience_ns, patience_rows;  // a wait for replies; larger batches wait in proportion
    void *const *others;
    int64_t num_others;
    int32_t bell;
    int64_t attend_ns, send_ns, wait_ns, sum_ns;  // out: this step's are added
    int64_t *exchange_ns;  // out: of each exchange in its turn, from sending to the sum; room for all
    int64_t *beyond_ns;    // out: the same without what the slowest worker took to compute
    int64_t num_exchanges;
};

// Outputs of one panel, and numbers of one vector register.
EXPORT int64_t panel_width(void);
EXPORT int64_t vector_width(void);

// Weights as files have them, of a kind: float32 (0), bfloat16 (1), float16 (2). [halves * rows, num_in] -> panels of
// float32, or of the same kind; each takes as many outputs of each half. Outputs without a row become zeros.
EXPORT void pack_stored(const void *weight, int kind, int64_t rows, int64_t halves, int64_t num_in,
                        int form, void *panels);

// The same, rounded to bytes with a scale for each output; also sums up the part of ZERO in each. Inputs up to a
// whole four are zeros.
EXPORT void pack_stored_int8(const void *weight, int kind, int64_t rows, int64_t halves,
                             int64_t num_in, int8_t *panels, float *scales, int32_t *offsets);

// The same numbers as float32.
EXPORT void widen_stored(const void *weights, int kind, int64_t count, float *to);

// How many are infinite or no number.
EXPORT int64_t count_not_finite(const void *weights, int kind, int64_t count);

// A byte for each code of int4 or fp8 [halves * rows, num_in] -> panels; each takes as many outputs of each half.
EXPORT void pack_codes(const uint8_t *codes, int64_t rows, int64_t halves, int64_t num_in, int form,
                       void *panels);

// Bytes with two codes of four bits, the low one first -> a byte for each code.
EXPORT void unpack_codes(const uint8_t *packed, int64_t count, uint8_t *codes);

// Scales of groups [halves * rows, groups] -> float16 in panels, and a power of two for each output.
EXPORT void pack_group_scales(const float *scales, int64_t rows, int64_t halves, int64_t groups,
                              uint16_t *panels, float *outputs);

// Rounds weights [rows, num_in] to codes around 8, with a scale for each group of inputs: of those that bring a group's
// extreme to one of `steps`, the one with the least squared error. `room`: three groups, each up to a whole vector.
EXPORT void round_codes(const float *weights, int64_t rows, int64_t num_in, int64_t group,
                        const float *steps, int64_t num_steps, float *room, uint8_t *codes,
                        float *scales);

// Bytes of `scratch` that `linear` needs for a row.
EXPORT int64_t linear_scratch(const struct matrix *matrix);

// The outputs `ids` [count] of a matrix -> out [count, num_in]: rows of an embedding.
EXPORT void look_up(const struct matrix *matrix, const int64_t *ids, int64_t count, float *out,
                    int threads);

// x [count, heads, num_in] -> out [count, heads, num_out], a matrix for each head; strides in floats.
// int8 and int4 take one head.
EXPORT void linear(const struct matrix *matrices, int64_t heads, const float *x, int64_t x_stride,
                   int64_t x_head_stride, int64_t count, float *out, int64_t out_stride,
                   int64_t out_head_stride, uint8_t *scratch, int threads);

// Bytes of `scratch` that `experts` needs.
EXPORT int64_t experts_scratch(int64_t rows, int64_t top_k, int64_t hidden, int64_t size,
                               int64_t num_slots, int threads);

// x [T, H], weights and slot_ids [T, k] (-1: not here) -> out [T, H].
EXPORT void experts(const struct expert *const *slots, int64_t num_slots, const float *x,
                    int64_t num_rows, int64_t hidden, int64_t size, const float *weights,
                    const int32_t *slot_ids, int64_t top_k, float *out, uint8_t *scratch,
                    int threads);

// results [T * k, H] -> out [T, H], each row's in the order of `routed` [T, k], the place of a choice
// in `results`. The sum that `experts` makes of the same results in the same order, to the bit.
EXPORT void sum_of_choices(float *results, int64_t num_rows, int64_t hidden, const float *weights,
                           int32_t *routed, int64_t top_k, float *out, int threads);

// sum = x + delta (or none) [T, size], out = sum / rms(sum) * weight; x by its stride.
EXPORT void add_rms_norm(const float *x, int64_t x_stride, const float *delta, const float *weight,
                         float eps, int64_t count, int64_t size, float *sum, float *out,
                         int threads);

// Norms (by `qk_norm` [heads + kv_heads, d], each head by itself or all of a kind together; or none) the
// queries and keys in qkv [T, (heads + 2 kv_heads) d], in place, bounds them and the values by `clip` (0:
// nothing), rotates the first `rotated` numbers of each query and key, and stores keys and values at
// their offsets (or none) in the cache. Row t turns by row t of cos and sin [., rotated], or, with
// `positions`, by that of its position.
// Of a block it keeps all of a head's keys, token by token (key_stride 1) or dimension by dimension
// (key_stride block_size), then all its values, then the next head's.
EXPORT void store_grouped(float *qkv, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
                          const float *qk_norm, int is_wide, float eps, float clip,
                          const float *cos, const float *sin, int64_t rotated,
                          const int64_t *positions, int interleaved, const int64_t *offsets,
                          float *cache, int64_t block_size, int64_t key_stride, int threads);

// The same for latent attention: norms the latent, rotates the key that all heads share.
EXPORT void store_latent(const float *latent, int64_t latent_stride, const float *weight, float eps,
                         const float *key, int64_t key_stride, const float *cos, const float *sin,
                         int interleaved, int64_t count, int64_t rank, int64_t rope,
                         const int64_t *offsets, float *cache);

// Rotates x [T, heads, d] into out; strides in floats, rows and heads may overlap nothing else.
EXPORT void rotate_heads(const float *x, int64_t x_stride, int64_t x_head_stride, int64_t count,
                         int64_t heads, int64_t dim, const float *cos, const float *sin,
                         int interleaved, float *out, int64_t out_stride, int64_t out_head_stride);

// Logits [T, E], which this may overwrite -> the weights and ids of the chosen [T, k], the best first; of
// equals, the first.
EXPORT void select_experts(float *logits, int64_t count, int64_t num_experts, int64_t top_k,
                           const struct gating *gating, float *weights, int32_t *ids,
                           int threads);

// The same from the rows x [T, H] on, by a gate in float32; `logits` has room for them.
EXPORT void choose_experts(const struct matrix *gate, const float *x, int64_t count, int64_t top_k,
                           const struct gating *gating, float *logits, float *weights,
                           int32_t *ids, int threads);

// Bytes of `scratch` that `sample` needs.
EXPORT int64_t sample_scratch(int64_t vocab, int threads);

// Logits [R, vocab] by stride -> the token of each row [R]. Weights have `bits` bits behind the point,
// top_p and draws 53. `sharpness`: the temperature's inverse; 0: the likeliest.
EXPORT void sample(const float *logits, int64_t stride, int64_t count, int64_t vocab, int bits,
                   const double *sharpness, const int64_t *top_k, const int64_t *top_p,
                   const int64_t *min_weight, const int64_t *draws, int64_t *tokens,
                   uint8_t *scratch, int threads);

// Bytes of `scratch` that `split_choices` needs.
EXPORT int64_t split_choices_scratch(int64_t num_experts);

// Choices [T, k] of experts 0..E-1, different in a row, and their weights -> the same with united experts E..,
// or -1 and a weight of 0; to degraded [T] is added how many of a row's are not served by their own expert.
EXPORT void split_choices(int32_t *ids, float *weights, int64_t count, int64_t top_k,
                          const struct substitution *substitution, const struct promises *promises,
                          int32_t *degraded, uint8_t *scratch);

// Bytes of `scratch` that `schedule_experts` needs.
EXPORT int64_t schedule_experts_scratch(int64_t num_experts, int64_t num_instances);

// ids [count] (no expert: outside 0..E-1), replicas [E, N] (-1: none), live [N] (0 or 1), load [N]
// (in: carried over; out: with this batch), weights and row [N] -> instance and replica [E], and of
// every choice its replica less `first`, -1 where that is outside `first`..`end`-1.
EXPORT void schedule_experts(const int32_t *ids, int64_t count, const int32_t *replicas,
                             int64_t num_experts, int64_t num_instances, const uint8_t *live,
                             const int64_t *weights, const int64_t *row, int64_t *load,
                             int32_t first, int32_t end, int32_t *instance, int32_t *replica,
                             int32_t *of_choice, uint8_t *scratch);

// Bytes of `scratch` that `attention` needs.
EXPORT int64_t attention_scratch(const struct shape *shape, const struct batch *batch, int threads);

// queries [T, heads, key_dim] by query_stride -> out [T, heads, value_dim] by out_stride.
EXPORT void attention(const struct shape *shape, const struct batch *batch, const float *queries,
                      const float *cache, float *out, uint8_t *scratch, int threads);

// Bytes of `scratch` that `grouped_query_layer` needs.
EXPORT int64_t grouped_query_scratch(const struct layer *layer, const struct step *step,
                                     int threads);

// sum = x + delta (or none) + attention of its norm [T, H], out = the norm of that. The rows'
// keys and values are written to `cache`.
EXPORT void grouped_query_layer(const struct layer *layer, const struct step *step, const float *x,
                                const float *delta, float *cache, float *sum, float *out,
                                uint8_t *scratch, int threads);

// Bytes of `scratch` that `decoder_step` needs.
EXPORT int64_t decoder_step_scratch(const struct decoder *decoder, const struct whole_step *step,
                                    int threads);

// Writes the rows' keys and values to `caches`, one for each layer, and the logits [A, vocab] of those
// that attend in the last layer to `logits`, or none.
EXPORT void decoder_step(const struct decoder *decoder, const struct whole_step *step,
                         float *const *caches, float *logits, uint8_t *scratch, int threads);

// The checksum of frames: XXH3, 64 bits.
EXPORT uint64_t checksum_of(const uint8_t *data, int64_t size, uint64_t seed);

// Bytes of the memory that both sides of a channel map, zeroed at first.
EXPORT int64_t channel_bytes(int64_t capacity);

// A side, 0 or 1, of the channel in `memory`. `bell`: the other side's eventfd; `control`: becomes
// readable when the peer is gone; `most`: bytes of a message. NULL: there is no memory.
EXPORT void *channel_open(uint8_t *memory, int64_t capacity, int side, int bell, int control,
                          int64_t most);

EXPORT void channel_close(void *channel);

// A UCX worker whose messages all belong to channels; NULL: UCX is not loaded. `descriptor` becomes
// readable when UCX has something to do; `most`: bytes of a message.
EXPORT void *ucx_plane_open(void *worker, int descriptor, int64_t most);

// No call of UCX from now on.
EXPORT void ucx_plane_close(void *plane);

// True if something moved.
EXPORT int ucx_plane_progress(void *plane);

// A channel over a UCX endpoint; see `channel_open`.
EXPORT void *channel_open_ucx(void *plane, void *endpoint, uint64_t send_tag, uint64_t receive_tag,
                              int control);

// A channel over a connected, non-blocking socket, which stays the caller's; see `channel_open`.
EXPORT void *channel_open_stream(int socket, int64_t most);

// Becomes readable when messages may have come; -1: the bell is rung.
EXPORT int channel_descriptor(const void *channel);

// Ends the use of a UCX endpoint; messages that come for it are dropped.
EXPORT void channel_unlink(void *channel);

// Exchanges whose replies are awaited without Python.
EXPORT int64_t channel_outstanding(void *channel);

// Bytes of a message that was too long, and has broken the channel; 0: none was.
EXPORT int64_t channel_excess(void *channel);

// Messages of a channel may be answered by `answers` from now on.
EXPORT void channel_answer(void *channel, void *answers);

// Copies a message; what the ring has no room for waits. -1: the channel is broken.
EXPORT int channel_send(void *channel, const uint8_t *message, int64_t size);

// Bytes of the next message, which stays until `channel_taken`; 0: none; -1: the channel is broken.
EXPORT int64_t channel_take(void *channel, uint8_t **message);

EXPORT void channel_taken(void *channel);

// Has the peer ring from now on; false if there is something to do already.
EXPORT int channel_sleep(void *channel);

// Messages that came while another was awaited, the first of them; `channel_forget` frees it.
EXPORT int64_t channel_kept(void *channel, uint8_t **message);

EXPORT void channel_forget(void *channel);

// Ends all waits for it.
EXPORT void channel_break(void *channel);

// Puts a message to those.
EXPORT void channel_hold(void *channel, const uint8_t *message, int64_t size);

// Sleeps as an event loop does, and answers meanwhile what can be answered here. 0: the time is over;
// 1: a channel has a message for Python; 2: a descriptor of `epoll` other than `bell` is ready.
EXPORT int wait_for_events(void *const *channels, int64_t count, int epoll, int bell,
                           int64_t timeout_ns);

// Answers of one process; `max_`: bounds of a frame.
EXPORT void *answers_open(int64_t max_rows, int64_t max_cols, int64_t max_bytes, int threads);

EXPORT void answers_close(void *answers);

// The memory that `found` points to must stay until its epoch is dropped.
EXPORT void answers_add(void *answers, const struct answerable *found);

EXPORT void answers_drop(void *answers, uint64_t epoch);

// When a step last asked for an epoch, in ns of the monotonic clock; 0: never.
EXPORT int64_t answers_asked(void *answers, uint64_t epoch);

EXPORT void answers_tally(void *answers, struct answer_tally *taken);

// Batches since the last call, one behind the other: epoch (two halves), layer, policy, rows, k,
// experts of the busiest worker, ids [T, k]. Returns their numbers; there is room for all in
// answers_log_size.
EXPORT int64_t answers_log(void *answers, int32_t *taken);

EXPORT int64_t answers_log_size(void);

// Takes the last batches that were computed since the last call, 256 at most: of each the experts that it
// activated here, their choices, and what gating, choosing and computing took, in ns.
EXPORT int64_t answers_samples(void *answers, int64_t *taken);

// rows [count, hidden] -> packed [count, hidden + 4], as moesaic.experts.wire_rows has them.
EXPORT void pack_int8_rows(const float *rows, int64_t count, int64_t hidden, int8_t *packed);

// The way back.
EXPORT void unpack_int8_rows(const int8_t *packed, int64_t count, int64_t hidden, float *rows);

// Workers that a batch can ask.
EXPORT int64_t most_asked(void);

// Sends a batch to all workers of a layer; -1: there is no memory.
EXPORT int ask_begin(const struct ask *ask, struct asked *asked);

// Waits for the replies and adds them up. 0: `out` is the sum; 1: some answer is no plain reply, or a
// peer is lost; 2: the deadline is over. What came then is kept by the channels.
EXPORT int ask_finish(const struct ask *ask, struct asked *asked, int bell);

// Ends an exchange that `ask_finish` left to Python, or that nobody finishes.
EXPORT void ask_end(const struct ask *ask);

// Bytes of `scratch` that `decoder_step_apart` needs.
EXPORT int64_t decoder_step_apart_scratch(const struct decoder *decoder, const struct apart *apart,
                                          const struct part *parts, int64_t num_parts,
                                          int threads);

// What `decoder_step` does, with experts in other processes: while one part waits for its experts,
// the next one computes its attention. 0: the logits are there; 1: an exchange failed, and Python
// has to settle those that are left in `parts`.
EXPORT int decoder_step_apart(const struct decoder *decoder, struct apart *apart,
                              struct part *parts, int64_t num_parts, float *const *caches,
                              uint8_t *scratch, int threads);

// Carries out the events of a simulated fleet before a time. 0: done; -1: there is no memory.
EXPORT int advance_edge(const struct edge_state *state, const double *until_s);

#endif
