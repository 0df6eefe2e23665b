// The operations between the products: one row at a time, each in one pass.
#include <math.h>

#include "calls.h"
#include "compute/pool.h"
#include "vector.h"

enum { PARALLEL = 32768 };  // numbers below which a second thread costs more than it saves
enum { ROWS = 64 };         // of one task

typedef void row_function(void *with, int64_t row);

struct each {
    row_function *run;
    void *with;
    int64_t count;
};

static void some_rows(void *with, int64_t task, int worker) {
    const struct each *each = with;
    const int64_t end = (task + 1) * ROWS < each->count ? (task + 1) * ROWS : each->count;
    (void)worker;
    for (int64_t row = task * ROWS; row < end; row++) each->run(each->with, row);
}

// Does `count` rows of `size` numbers.
static void for_each(row_function *run, void *with, int64_t count, int64_t size, int threads) {
    struct each each = {run, with, count};
    in_parallel(some_rows, &each, (count + ROWS - 1) / ROWS, count * size > PARALLEL ? threads : 1);
}

INLINE float scale_of(const float *x, int64_t size, float eps) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma_of(load(x + i), load(x + i), squares);
    const vec rest = load_some(x + i, size - i);
    return 1.0f / __builtin_sqrtf(sum_of(fma_of(rest, rest, squares)) / (float)size + eps);
}

INLINE void norm_row(const float *x, const float *weight, int64_t size, float eps, float *out) {
    const float scale = scale_of(x, size, eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

struct add_norm {
    const float *x, *delta, *weight;
    float *sum, *out, eps;
    int64_t x_stride, size;
};

static void add_norm_row(void *with, int64_t t) {
    const struct add_norm *c = with;
    const float *row = c->x + t * c->x_stride;
    if (c->delta) {
        float *to = c->sum + t * c->size;
        for (int64_t i = 0; i < c->size; i++) to[i] = row[i] + c->delta[t * c->size + i];
        row = to;
    }
    norm_row(row, c->weight, c->size, c->eps, c->out + t * c->size);
}

EXPORT void add_rms_norm(const float *x, int64_t x_stride, const float *delta, const float *weight,
                         float eps, int64_t count, int64_t size, float *sum, float *out,
                         int threads) {
    struct add_norm call = {x, delta, weight, sum, out, eps, x_stride, size};
    for_each(add_norm_row, &call, count, size, threads);
}

// A pair (a, b) turns into (a cos - b sin, b cos + a sin); `sin` has the sign in it.
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t size, int interleaved) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        const float a = x[first], b = x[second];
        x[first] = a * cos[first] + b * sin[first];
        x[second] = b * cos[second] + a * sin[second];
    }
}

struct grouped {
    float *qkv, *cache, eps, clip;
    const float *qk_norm, *cos, *sin;
    const int64_t *positions, *offsets;
    int64_t heads, kv_heads, dim, rotated, block_size, key_stride;
    int is_wide, interleaved;
};

// Norms the heads of queries, then those of keys: each by itself, or all together.
static void norm_heads(const struct grouped *c, float *row) {
    const int64_t dim = c->dim, all = (c->heads + c->kv_heads) * dim;
    const int64_t queries = c->is_wide ? c->heads * dim : dim, keys = c->is_wide ? c->kv_heads * dim : dim;
    for (int64_t i = 0; i < all;) {
        const int64_t size = i < c->heads * dim ? queries : keys;
        norm_row(row + i, c->qk_norm + i, size, c->eps, row + i);
        i += size;
    }
}

static void clip_row(float *row, int64_t size, float bound) {
    for (int64_t i = 0; i < size; i++)
        row[i] = row[i] > bound ? bound : row[i] < -bound ? -bound : row[i];
}

static void store_grouped_row(void *with, int64_t t) {
    const struct grouped *c = with;
    const int64_t heads = c->heads, kv_heads = c->kv_heads, dim = c->dim;
    const int64_t turn = (c->positions ? c->positions[t] : t) * c->rotated;
    float *row = c->qkv + t * (heads + 2 * kv_heads) * dim;
    if (c->qk_norm) norm_heads(c, row);
    if (c->clip > 0) clip_row(row, (heads + 2 * kv_heads) * dim, c->clip);
    for (int64_t h = 0; h < heads + kv_heads; h++)
        rotate(row + h * dim, c->cos + turn, c->sin + turn, c->rotated, c->interleaved);
    if (!c->offsets || c->offsets[t] < 0) return;
    const int64_t head_stride = 2 * c->block_size * dim, block = c->offsets[t] / c->block_size;
    const int64_t token = c->offsets[t] % c->block_size;
    float *to = c->cache + block * kv_heads * head_stride;
    for (int64_t h = 0; h < kv_heads; h++, to += head_stride) {
        const float *key = row + (heads + h) * dim, *value = key + kv_heads * dim;
        if (c->key_stride == 1)
            memcpy(to + token * dim, key, (size_t)dim * 4);
        else
            for (int64_t i = 0; i < dim; i++) to[i * c->key_stride + token] = key[i];
        memcpy(to + head_stride / 2 + token * dim, value, (size_t)dim * 4);
    }
}

EXPORT void store_grouped(float *qkv, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
                          const float *qk_norm, int is_wide, float eps, float clip,
                          const float *cos, const float *sin, int64_t rotated,
                          const int64_t *positions, int interleaved, const int64_t *offsets,
                          float *cache, int64_t block_size, int64_t key_stride, int threads) {
    struct grouped call = {
        .qkv = qkv,
        .cache = cache,
        .eps = eps,
        .clip = clip,
        .qk_norm = qk_norm,
        .cos = cos,
        .sin = sin,
        .positions = positions,
        .offsets = offsets,
        .heads = heads,
        .kv_heads = kv_heads,
        .dim = dim,
        .rotated = rotated,
        .block_size = block_size,
        .key_stride = key_stride,
        .is_wide = is_wide,
        .interleaved = interleaved,
    };
    for_each(store_grouped_row, &call, count, (heads + 2 * kv_heads) * dim, threads);
}

EXPORT void store_latent(const float *latent, int64_t latent_stride, const float *weight, float eps,
                         const float *key, int64_t key_stride, const float *cos, const float *sin,
                         int interleaved, int64_t count, int64_t rank, int64_t rope,
                         const int64_t *offsets, float *cache) {
    for (int64_t t = 0; t < count; t++) {
        if (offsets[t] < 0) continue;
        float *to = cache + offsets[t] * (rank + rope);
        norm_row(latent + t * latent_stride, weight, rank, eps, to);
        memcpy(to + rank, key + t * key_stride, (size_t)rope * 4);
        rotate(to + rank, cos + t * rope, sin + t * rope, rope, interleaved);
    }
}

EXPORT void rotate_heads(const float *x, int64_t x_stride, int64_t x_head_stride, int64_t count,
                         int64_t heads, int64_t dim, const float *cos, const float *sin,
                         int interleaved, float *out, int64_t out_stride, int64_t out_head_stride) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *to = out + t * out_stride + h * out_head_stride;
            memmove(to, x + t * x_stride + h * x_head_stride, (size_t)dim * 4);
            rotate(to, cos + t * dim, sin + t * dim, dim, interleaved);
        }
}

struct selection {
    float *logits, *weights;
    int32_t *ids;
    int64_t num_experts, top_k;
    const struct gating *gating;
};

static int by_logits_alone(const struct gating *g) {
    const int divides_plainly = !g->normalise || (g->least == 0 && g->epsilon == 0);
    return !g->sigmoid && !g->correction && g->kept_groups == g->num_groups && divides_plainly;
}

// Logits to scores. No number depends on where in the row it stands.
static void score_row(const struct gating *g, float *row, int64_t num_experts) {
    float most = row[0], total = 0;
    for (int64_t e = 1; e < num_experts; e++)
        if (row[e] > most) most = row[e];
    for (int64_t e = 0; e < num_experts; e += LANES) {
        const int64_t count = num_experts - e < LANES ? num_experts - e : LANES;
        const vec x = count < LANES ? load_some(row + e, count) : load(row + e);
        const vec scores = g->sigmoid ? 1.0f / (1.0f + exp_of(-x)) : exp_of(x - most);
        store_some(row + e, scores, count);
        for (int64_t i = 0; i < count; i++) total += scores[i];
    }
    for (int64_t e = 0; e < num_experts && !g->sigmoid; e++) row[e] /= total;
}

// By which experts are chosen, of their scores.
INLINE float rank_of(const struct gating *g, const float *row, int64_t e) {
    return g->correction ? row[e] + g->correction[e] : row[e];
}

static float score_of_group(const struct gating *g, const float *row, int64_t first, int64_t size) {
    float best = -INFINITY, next = -INFINITY;
    for (int64_t e = first; e < first + size; e++) {
        const float rank = rank_of(g, row, e);
        if (rank > best)
            next = best, best = rank;
        else if (rank > next)
            next = rank;
    }
    return g->group_best > 1 && size > 1 ? best + next : best;
}

// The scores of groups that are not among the best become -inf. Such a group is worse than kept_groups
// others, so it does not matter to those behind it whether it counts still.
static void leave_groups(const struct gating *g, float *row, int64_t num_experts) {
    const int64_t size = num_experts / g->num_groups;
    for (int64_t n = 0; n < g->num_groups; n++) {
        const float own = score_of_group(g, row, n * size, size);
        int64_t better = 0;
        for (int64_t m = 0; m < g->num_groups && better < g->kept_groups; m++) {
            const float other = m == n ? -INFINITY : score_of_group(g, row, m * size, size);
            better += other > own || (other == own && m < n);
        }
        for (int64_t e = n * size; e < (n + 1) * size && better == g->kept_groups; e++)
            row[e] = -INFINITY;
    }
}

static void select_row(void *with, int64_t t) {
    const struct selection *c = with;
    const struct gating *g = c->gating;
    float *row = c->logits + t * c->num_experts, *weight = c->weights + t * c->top_k, last = 0;
    int32_t *id = c->ids + t * c->top_k;
    const int is_scored = !by_logits_alone(g);
    if (is_scored) score_row(g, row, c->num_experts);
    if (g->kept_groups < g->num_groups) leave_groups(g, row, c->num_experts);
    for (int64_t n = 0; n < c->top_k; n++) {  // the best that comes after the last chosen
        int32_t best = -1;
        float most = 0;
        for (int32_t e = 0; e < c->num_experts; e++) {
            const float rank = rank_of(g, row, e);
            if (n && !(rank < last || (rank == last && e > id[n - 1]))) continue;
            if (best < 0 || rank > most) best = e, most = rank;
        }
        // Logits that are no numbers: the experts from the first on, so that ids stay in range.
        id[n] = best < 0 ? (int32_t)n : best;
        last = rank_of(g, row, id[n]), weight[n] = row[id[n]];
    }
    float total = 0;
    for (int64_t n = 0; n < c->top_k && is_scored; n++) total += weight[n];
    if (!is_scored) {
        const float most = weight[0];
        for (int64_t e = 0; e < c->num_experts && !g->normalise; e += LANES) {
            const int64_t left = c->num_experts - e;
            const vec x = left < LANES ? load_some(row + e, left) : load(row + e);
            const vec exps = exp_of(x - most);
            for (int64_t i = 0; i < LANES && i < left; i++) total += exps[i];
        }
        for (int64_t n = 0; n < c->top_k; n++) {
            weight[n] = exp_of(all(weight[n] - most))[0];
            if (g->normalise) total += weight[n];
        }
    } else if (g->normalise) {
        total = (total < g->least ? g->least : total) + g->epsilon;
    } else {
        total = 1;
    }
    for (int64_t n = 0; n < c->top_k; n++) weight[n] *= g->scaling / total;
}

EXPORT void select_experts(float *logits, int64_t count, int64_t num_experts, int64_t top_k,
                           const struct gating *gating, float *weights, int32_t *ids,
                           int threads) {
    struct selection call = {logits, weights, ids, num_experts, top_k, gating};
    for_each(select_row, &call, count, num_experts * top_k, threads);
}

EXPORT void choose_experts(const struct matrix *gate, const float *x, int64_t count, int64_t top_k,
                           const struct gating *gating, float *logits, float *weights,
                           int32_t *ids, int threads) {
    linear(gate, 1, x, gate->num_in, 0, count, logits, gate->num_out, 0, 0, threads);
    select_experts(logits, count, gate->num_out, top_k, gating, weights, ids, threads);
}
