// The tokens of a step, picked without sorting the vocabulary.
//   Order    the likeliest first, of equals the lowest id. What a rule keeps is a beginning of it, and is told by
//            its edge: the last logit, and the last id of those that have it.
//   Weights  round(2^bits * e^((logit - most) * sharpness)): whole numbers, so that sums are the same in any order.
//   Draw     among the weights of the kept tokens, which lie side by side in the order of their ids.
//   Edge     of a histogram of the logits one bucket holds it; a histogram of that bucket follows, and so on.
// Not a number: weighs nothing, as minus infinity does.
#include "calls.h"
#include "arena.h"
#include "compute/pool.h"
#include "vector.h"

enum { BUCKETS = 1024 };
enum { CHUNK = 64 };  // tokens that are passed over together
enum { BLOCK = 512 };  // tokens whose weights are summed up together, before the draw is looked for
enum { HALF = LANES / 2 };
enum { DRAW_BITS = 53 };

typedef double dvec __attribute__((vector_size(LANES * 4)));
typedef int64_t lvec __attribute__((vector_size(LANES * 4)));
typedef lvec lvec_unaligned __attribute__((aligned(8), may_alias));
typedef float half_vec __attribute__((vector_size(LANES * 2)));
typedef half_vec half_vec_unaligned __attribute__((aligned(4), may_alias));
typedef int32_t half_ivec __attribute__((vector_size(LANES * 2)));

// The row of one task. After top-k only what it keeps is left: `ids` says of which tokens.
struct row {
    const float *logits;
    const int32_t *ids;  // or none: all of them
    int64_t size;
    float most, least;  // of finite logits
    int64_t *weights;
    int32_t *candidates;
    uint16_t *buckets;
};

struct edge {
    float logit;
    int64_t last;
};

INLINE dvec every(double value) { return value - (dvec){0}; }
INLINE dvec pick_of(lvec where, dvec yes, dvec no) {
    return (dvec)((where & (lvec)yes) | (~where & (lvec)no));
}

// Adding it rounds to a whole number, which then is what the bits are more than its own.
static const double SHIFT = 6755399441055744.0;  // 1.5 * 2^52

INLINE lvec whole(dvec x) { return (lvec)(x + SHIFT) - (lvec)every(SHIFT); }

// e^x for x <= 0, within a few units in the last place; below -64, as of -64: no weight comes of it.
// Products and sums are rounded one by one, as in kernels/token_weights.py and kernels/triton/sampling.py: the bits are
// the same on every machine. The coefficients are those of the series: 1 / 12! to 1 / 0!.
INLINE dvec exp_of_doubles(dvec x) {
    x = pick_of(x > -64.0, x, every(-64.0));
    const dvec shifted = x * 1.4426950408889634 + SHIFT;
    const dvec n = shifted - SHIFT;
    // ln 2 in two parts
    const dvec r = (x - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10;
    dvec p = every(1.0 / 479001600);
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const lvec power = ((lvec)shifted - (lvec)every(SHIFT) + 1023) << 52;
    return p * (dvec)power;
}

// Some logits; minus infinity behind the end.
INLINE dvec load_logits(const float *from, int64_t left) {
    half_vec value;
    if (left >= HALF) {
        value = *(const half_vec_unaligned *)from;
    } else {
        value = (half_vec){0} - __builtin_inff();
        memcpy(&value, from, (size_t)left * 4);
    }
    return __builtin_convertvector(value, dvec);
}

INLINE int64_t total_of(lvec v) {
    int64_t total = 0;
    for (int lane = 0; lane < HALF; lane++) total += v[lane];
    return total;
}

static void find_range(struct row *row) {
    const vec lowest = all(-__builtin_inff());
    vec most = lowest, least = -lowest;
    for (int64_t i = 0; i < row->size; i += LANES) {
        const int64_t left = row->size - i;
        vec x = lowest;
        if (left >= LANES)
            x = load(row->logits + i);
        else
            memcpy(&x, row->logits + i, (size_t)left * 4);
        most = larger(x, most);
        least = choose((x < least) & (x > lowest), x, least);
    }
    row->most = largest_of(most);
    row->least = -largest_of(-least);
}

static int64_t first_of(const struct row *row, float logit) {
    for (int64_t i = 0; i < row->size; i++)
        if (row->logits[i] == logit) return i;
    return 0;
}

// Returns the sum.
static int64_t weigh(const struct row *row, double sharpness, int bits) {
    const double most = row->most, one = (double)(1LL << bits);
    lvec total = {0};
    for (int64_t i = 0; i < row->size; i += HALF) {
        const dvec below = load_logits(row->logits + i, row->size - i) - most;
        const lvec weights = whole(exp_of_doubles(below * sharpness) * one);
        *(lvec_unaligned *)(row->weights + i) = weights;
        total += weights;
    }
    return total_of(total);
}

// The tokens among which an edge is looked for, and how they are parted.
struct span {
    const float *logits;
    const int32_t *which;  // or none: all
    int64_t size;
    double most, least, scale;
    uint16_t *buckets;  // 0: the likeliest
};

INLINE int64_t index_of(const struct span *span, int64_t i) {
    return span->which ? span->which[i] : i;
}

// The bucket of each token. Minus infinity and not a number: the last one.
static void find_buckets(const struct span *span) {
    const dvec last = every(BUCKETS - 1);
    for (int64_t i = 0; i < span->size; i += HALF) {
        dvec x;
        if (span->which) {
            half_vec value = {0};
            for (int64_t j = 0; j < HALF && i + j < span->size; j++)
                value[j] = span->logits[span->which[i + j]];
            x = __builtin_convertvector(value, dvec);
        } else {
            x = load_logits(span->logits + i, span->size - i);
        }
        const dvec at = (span->most - x) * span->scale;
        const half_ivec found = __builtin_convertvector(pick_of(at < last, at, last), half_ivec);
        for (int64_t j = 0; j < HALF; j++) span->buckets[i + j] = (uint16_t)found[j];
    }
}

// What the tokens of each bucket are worth.
static void sum_up(const struct span *span, const int64_t *weights, int64_t *sums) {
    int64_t aside[BUCKETS] = {0};  // every second one: else each addition might wait for the one before
    memset(sums, 0, BUCKETS * sizeof *sums);
    if (!weights)
        for (int64_t i = 0; i < span->size; i++) (i & 1 ? aside : sums)[span->buckets[i]]++;
    else
        for (int64_t i = 0; i < span->size; i++)
            (i & 1 ? aside : sums)[span->buckets[i]] += weights[index_of(span, i)];
    for (int b = 0; b < BUCKETS; b++) sums[b] += aside[b];
}

// The tokens of a bucket, in their order; `found` may be the list that they are on now.
static int64_t collect(const struct span *span, uint16_t bucket, int32_t *found) {
    int64_t num = 0;
    for (int64_t from = 0; from < span->size; from += CHUNK) {
        const int64_t end = span->size < from + CHUNK ? span->size : from + CHUNK;
        int any = 0;  // most chunks have none: this loop is one of vectors
        for (int64_t i = from; i < end; i++) any |= span->buckets[i] == bucket;
        for (int64_t i = from; any && i < end; i++) {
            found[num] = (int32_t)index_of(span, i);
            num += span->buckets[i] == bucket;
        }
    }
    return num;
}

// The edge of the shortest beginning of the order that is worth `need`, by weights, or 1 each.
// A logit further than `reach` below the largest is worth nothing.
static struct edge find_edge(const struct row *row, const int64_t *weights, int64_t need,
                             double reach) {
    struct span span = {row->logits, 0, row->size, row->most, row->least, 0, row->buckets};
    if (span.most - reach > span.least) span.least = span.most - reach;
    while (span.least < span.most) {
        int64_t sums[BUCKETS];
        span.scale = BUCKETS / (span.most - span.least);
        find_buckets(&span);
        sum_up(&span, weights, sums);
        uint16_t bucket = 0;
        while (bucket < BUCKETS - 1 && sums[bucket] < need) need -= sums[bucket++];
        span.size = collect(&span, bucket, row->candidates);
        span.which = row->candidates;
        span.most = -__builtin_inf(), span.least = __builtin_inf();
        for (int64_t i = 0; i < span.size; i++) {
            const double x = row->logits[span.which[i]];
            if (x > span.most) span.most = x;
            if (x < span.least && x > -__builtin_inf()) span.least = x;
        }
    }
    for (int64_t i = 0; i < span.size; i++) {
        const int64_t at = index_of(&span, i);
        if (row->logits[at] != span.most) continue;
        need -= weights ? weights[at] : 1;
        if (need <= 0) return (struct edge){row->logits[at], at};
    }
    return (struct edge){-__builtin_inff(), row->size};  // there are no more
}

// Leaves what is above the edge.
static void cut(struct row *row, struct edge edge, float *logits, int32_t *ids) {
    int64_t num = 0;
    for (int64_t from = 0; from < row->size; from += CHUNK) {
        const int64_t end = row->size < from + CHUNK ? row->size : from + CHUNK;
        int any = 0;
        for (int64_t i = from; i < end; i++) any |= row->logits[i] >= edge.logit;
        for (int64_t i = from; any && i < end; i++) {
            const float x = row->logits[i];
            logits[num] = x, ids[num] = (int32_t)i;
            num += (x > edge.logit) | ((x == edge.logit) & (i <= edge.last));
        }
    }
    row->logits = logits, row->ids = ids, row->size = num;
    if (num) row->least = row->most;
    for (int64_t i = 0; i < num; i++)
        if (logits[i] < row->least && logits[i] > -__builtin_inff()) row->least = logits[i];
}

// The weights of those tokens from `from` to `end` - 1 that are kept, of all of a vector.
INLINE lvec kept_weights(const struct row *row, struct edge edge, int64_t min_weight, int64_t i) {
    lvec at = {0};
    for (int lane = 0; lane < HALF; lane++) at[lane] = i + lane;
    const dvec x = load_logits(row->logits + i, row->size - i);
    const lvec weights = *(const lvec_unaligned *)(row->weights + i);
    const double logit = edge.logit;
    const lvec inside = (x > logit) | ((x == logit) & (at <= edge.last));
    return weights & inside & (weights >= min_weight);
}

static int64_t find_draw(const struct row *row, struct edge edge, int64_t min_weight, uint64_t draw,
                         int64_t *sums) {
    int64_t total = 0;
    for (int64_t from = 0; from < row->size; from += BLOCK) {
        lvec sum = {0};
        for (int64_t i = from; i < from + BLOCK && i < row->size; i += HALF)
            sum += kept_weights(row, edge, min_weight, i);
        total += sums[from / BLOCK] = total_of(sum);
    }
    if (!total) return first_of(row, row->most);
    int64_t left = (int64_t)((unsigned __int128)draw * (uint64_t)total >> DRAW_BITS), block = 0;
    while (left >= sums[block]) left -= sums[block++];
    for (int64_t i = block * BLOCK;; i += HALF) {
        const lvec weights = kept_weights(row, edge, min_weight, i);
        for (int lane = 0; lane < HALF; lane++)
            if ((left -= weights[lane]) < 0) return i + lane;
    }
}

struct sampling {
    const float *logits;
    int64_t stride, vocab;
    int bits;
    const double *sharpness;
    const int64_t *top_k, *top_p, *min_weight, *draws;
    int64_t *tokens;
    uint8_t *scratch;
};

static int64_t scratch_of_one(int64_t vocab) {
    return vocab * (4 + 4 + 4 + 2 + 8) + (vocab / BLOCK + 1) * 8 + HALF * (2 + 8) + 6 * 64;
}

static void sample_row(void *with, int64_t r, int worker) {
    const struct sampling *c = with;
    struct arena arena = {c->scratch + worker * (scratch_of_one(c->vocab) + 63) / 64 * 64};
    struct row row = {.logits = c->logits + r * c->stride, .size = c->vocab};
    find_range(&row);
    if (c->sharpness[r] == 0 || !(row.most < __builtin_inff()) || !(row.least <= row.most)) {
        c->tokens[r] = first_of(&row, row.most);
        return;
    }
    row.candidates = take(&arena, c->vocab * 4);
    row.buckets = take(&arena, (c->vocab + HALF) * 2);
    row.weights = take(&arena, (c->vocab + HALF) * 8);
    int64_t *sums = take(&arena, (c->vocab / BLOCK + 1) * 8);
    if (c->top_k[r] < c->vocab) {
        float *logits = take(&arena, c->vocab * 4);
        int32_t *ids = take(&arena, c->vocab * 4);
        cut(&row, find_edge(&row, 0, c->top_k[r], __builtin_inf()), logits, ids);
    }
    const int64_t total = weigh(&row, c->sharpness[r], c->bits);
    struct edge edge = {-__builtin_inff(), row.size};
    if (c->top_p[r] < 1LL << DRAW_BITS) {
        const unsigned __int128 share = (unsigned __int128)c->top_p[r] * (uint64_t)total;
        const int64_t need = (int64_t)((share + (1LL << DRAW_BITS) - 1) >> DRAW_BITS);
        edge = find_edge(&row, row.weights, need, 64.0 / c->sharpness[r]);
    }
    const int64_t at = find_draw(&row, edge, c->min_weight[r], (uint64_t)c->draws[r], sums);
    c->tokens[r] = row.ids ? row.ids[at] : at;
}

EXPORT int64_t sample_scratch(int64_t vocab, int threads) {
    return threads * ((scratch_of_one(vocab) + 63) / 64 * 64);
}

EXPORT void sample(const float *logits, int64_t stride, int64_t count, int64_t vocab, int bits,
                   const double *sharpness, const int64_t *top_k, const int64_t *top_p,
                   const int64_t *min_weight, const int64_t *draws, int64_t *tokens,
                   uint8_t *scratch, int threads) {
    struct sampling call = {logits, stride, vocab,      bits,  sharpness, top_k,
                            top_p,  min_weight, draws, tokens, scratch};
    in_parallel(sample_row, &call, count, threads);
}
