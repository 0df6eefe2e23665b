// A tile of attention: the scores of some queries for STRETCH positions, their weights, the values'
// sums.
#include "compute/attention_tile.h"

#define UPPER(i, side) (i) & (side) ? LANES + (i) - (side) : (i)
#define LOWER(i, side) (i) & (side) ? LANES + (i) : (i) + (side)

// Swaps the off-diagonal squares of this side: of all sides, that is a transposition.
#define SWAP_SQUARES(rows, side)                                                       \
    for (int i = 0; i < LANES && (side) < LANES; i++) {                                \
        const ivec upper = {EACH_LANE(UPPER, side)}, lower = {EACH_LANE(LOWER, side)}; \
        if (i & (side)) continue;                                                      \
        const vec a = rows[i], b = rows[(i + (side)) % LANES];                         \
        rows[i] = __builtin_shuffle(a, b, upper);                                      \
        rows[(i + (side)) % LANES] = __builtin_shuffle(a, b, lower);                   \
    }

// Turns LANES rows of LANES numbers into columns.
INLINE void transpose(vec rows[LANES]) {
#pragma GCC unroll 16
    SWAP_SQUARES(rows, 1)
#pragma GCC unroll 16
    SWAP_SQUARES(rows, 2)
#pragma GCC unroll 16
    SWAP_SQUARES(rows, 4)
#pragma GCC unroll 16
    SWAP_SQUARES(rows, 8)
}

void find(const struct shape *s, const struct sequence *q, const float *cache, int64_t kv_head,
          int64_t start, struct found *f) {
    const float *head = cache + kv_head * s->head_stride;
    const int32_t *block = q->blocks + start / s->block_size;
    f->count = q->length - start < STRETCH ? q->length - start : STRETCH;
    for (int64_t j = 0, offset = start % s->block_size; j < f->count; offset = 0, block++) {
        const float *keys = head + *block * s->block_stride, *values = keys + s->value_start;
        for (; offset < s->block_size && j < f->count; offset++, j++) {
            f->keys[j] = keys + offset * s->token_stride;
            f->values[j] = values + offset * s->value_stride;
        }
    }
}

enum { LINE = 16 };  // floats that the memory brings together
enum { EACH_LINE = LANES < 16 ? LINE / LANES : 1 };

// Asks for keys that lie dimension by dimension, of positions from `first` on.
static void expect_turned(const struct shape *s, const struct found *f, int64_t first) {
    for (int64_t j = first; j < f->count; j += LINE)
        for (int64_t i = 0; i < s->key_dim; i++)
            __builtin_prefetch(f->keys[j] + i * s->key_stride, 0, 2);
}

// Asks for all of a tile's keys and values at once.
static void expect(const struct shape *s, const struct found *f) {
    for (int64_t j = 0; j < f->count; j++) {
        for (int64_t i = 0; i < s->key_dim && s->key_stride == 1; i += LINE)
            __builtin_prefetch(f->keys[j] + i, 0, 2);
        for (int64_t i = 0; i < s->value_dim; i += LINE) __builtin_prefetch(f->values[j] + i, 0, 2);
    }
    if (s->key_stride != 1) expect_turned(s, f, 0);
}

// One panel of positions, from `first` on.
static void lay_out_keys(const struct shape *s, const struct found *f, int64_t first, float *keys) {
    const float *const *found = f->keys + first;
    const int64_t count = f->count - first;
    if (s->key_stride != 1) {  // positions behind the last get whatever is there: nobody sees them
        for (int64_t i = 0; i < s->key_dim; i++)
            for (int64_t j = 0; j < PANEL; j += LANES)
                store(keys + i * PANEL + j,
                      j < count ? load(found[j] + i * s->key_stride) : (vec){0});
        return;
    }
    for (int64_t j = 0; j < PANEL; j += LANES)
        for (int64_t i = 0; i < s->key_dim; i += LANES) {
            const int64_t left = s->key_dim - i < LANES ? s->key_dim - i : LANES;
            vec square[LANES];
            for (int64_t n = 0; n < LANES; n++) {
                const float *key = j + n < count ? found[j + n] + i : 0;
                square[n] = !key ? (vec){0} : left < LANES ? load_some(key, left) : load(key);
            }
            transpose(square);
            for (int64_t n = 0; n < left; n++) store(keys + (i + n) * PANEL + j, square[n]);
        }
}

// Lays the keys and values of a tile out for products.
static void lay_out(const struct shape *s, const struct found *f, const struct desk *d) {
    for (int64_t first = 0; first < f->count; first += PANEL)
        lay_out_keys(s, f, first, d->keys + first * s->key_dim);
    for (int64_t first = 0; first < s->value_dim; first += PANEL) {
        const int64_t columns = s->value_dim - first < PANEL ? s->value_dim - first : PANEL;
        float *panel = d->values + first * f->count;
        for (int64_t j = 0; j < f->count; j++) {
            const float *value = f->values[j] + first;
            if (columns == PANEL) {
                for (int64_t c = 0; c < PANEL; c += LANES)
                    store(panel + j * PANEL + c, load(value + c));
                continue;
            }
            memcpy(panel + j * PANEL, value, (size_t)columns * 4);
            memset(panel + j * PANEL + columns, 0, (size_t)(PANEL - columns) * 4);
        }
    }
}

// One query's weights of `count` positions, of which it sees [from, to); rescales what it has summed
// up so far.
static void soften(const struct desk *d, int64_t query, int64_t count, int64_t from, int64_t to,
                   int64_t values) {
    float *scores = d->scores + query * STRETCH, *sums = d->sums + query * values;
    const vec nothing = all(-__builtin_inff());
    vec most = nothing;
    for (int64_t j = 0; j < count; j += LANES) {
        vec x = load(scores + j);
        if (j < from || j + LANES > to)
            for (int64_t i = 0; i < LANES; i++)
                if (j + i < from || j + i >= to) x[i] = nothing[0];
        store(scores + j, x);
        most = larger(x, most);
    }
    const float largest = largest_of(most), before = d->largest[query];
    const float now = largest > before ? largest : before;
    vec total = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        const vec x = load(scores + j);
        const vec weights = choose(x == nothing, (vec){0}, exp_of(x - now));
        store(scores + j, weights);
        total += weights;
    }
    if (now != before) {
        const float shrink = exp_of(all(before - now))[0];
        d->totals[query] *= shrink;
        for (int64_t i = 0; i < values; i += LANES) store(sums + i, load(sums + i) * shrink);
        d->largest[query] = now;
    }
    d->totals[query] += sum_of(total);
}

void begin(const struct queries *q, const float *queries, const struct desk *d) {
    const struct shape *s = q->shape;
    for (int64_t i = 0; i < q->num; i++) {
        const int64_t row = q->first_row + i / q->group;
        const int64_t head = q->kv_head * q->group + i % q->group;
        const float *query = queries + row * s->query_stride + head * s->key_dim;
        for (int64_t c = 0; c < s->key_dim; c++)
            d->queries[i * s->key_dim + c] = query[c] * s->scale;
        d->largest[i] = s->sinks ? s->sinks[head] : -3.0e38f;
        d->totals[i] = s->sinks ? 1 : 0;  // a sink is a position before all others, with a value of zero
    }
    memset(d->sums, 0, (size_t)(q->num * wide(s->value_dim)) * 4);
}

// The weights of the queries from `skipped` on for the `count` positions of a tile, from their scores.
static void soften_all(const struct queries *q, int64_t skipped, int64_t start, int64_t count,
                       const struct desk *d) {
    for (int64_t i = skipped; i < q->num; i++) {
        const int64_t position = q->position + i / q->group, window = q->shape->window;
        const int64_t to = position + 1 - start < count ? position + 1 - start : count;
        const int64_t from = window ? position + 1 - window - start : 0;
        soften(d, i, count, from > 0 ? from : 0, to, wide(q->shape->value_dim));
    }
}

// Many queries: the tile is laid out once for all of them.
static void attend_many(const struct queries *q, const struct found *here, const struct found *next,
                        int64_t start, const struct desk *d) {
    const struct shape *s = q->shape;
    const int64_t values = wide(s->value_dim);
    const struct matrix keys = {.panels = d->keys, .num_in = s->key_dim, .num_out = STRETCH};
    const struct matrix tile = {.panels = d->values, .num_in = here->count, .num_out = values};
    // Rows before the tile see nothing of it.
    const int64_t skipped = start > q->position ? (start - q->position) * q->group : 0;
    const int64_t left = q->num - skipped;
    expect(s, next);
    lay_out(s, here, d);
    for (int64_t panel = 0; panel * PANEL < here->count; panel++)
        multiply_panel(&keys, floats_in(d->queries, s->key_dim), skipped, left, panel,
                       d->scores + skipped * STRETCH + panel * PANEL, STRETCH, PANEL, 0);
    soften_all(q, skipped, start, here->count, d);
    for (int64_t panel = 0; panel < values / PANEL; panel++)
        multiply_panel(&tile, floats_in(d->scores, STRETCH), skipped, left, panel,
                       d->sums + skipped * values + panel * PANEL, values, PANEL, 1);
}

// The scores of `num` queries for LANES positions; missing ones are `count` and more.
INLINE void score_few(const int num, const struct shape *s, const float *queries,
                      const float *const *keys, int64_t count, float *scores) {
    vec sums[TILE_ROWS] = {0};
    for (int64_t i = 0; i < s->key_dim; i += LANES) {
        const int64_t left = s->key_dim - i < LANES ? s->key_dim - i : LANES;
        vec square[LANES];
#pragma GCC unroll 16
        for (int n = 0; n < LANES; n++)
            square[n] = n >= count     ? (vec){0}
                        : left < LANES ? load_some(keys[n] + i, left)
                                       : load(keys[n] + i);
        transpose(square);
#pragma GCC unroll 16
        for (int n = 0; n < LANES; n++)
            if (n < left)
#pragma GCC unroll 8
                for (int r = 0; r < num; r++)
                    sums[r] = fma_of(all(queries[r * s->key_dim + i + n]), square[n], sums[r]);
    }
    for (int r = 0; r < num; r++) store(scores + r * STRETCH, sums[r]);
}

// The scores of `num` queries for a panel of positions, from `first` on, whose keys lie dimension by
// dimension.
INLINE void score_turned(const int num, const struct shape *s, const float *queries,
                         const struct found *f, const struct found *next, int64_t first,
                         float *scores) {
    vec sums[TILE_ROWS][TILE_VECTORS] = {0};
    const float *keys[TILE_VECTORS], *ahead[TILE_VECTORS];
    for (int v = 0; v < TILE_VECTORS; v++) {
        const int64_t at = first + v * LANES;
        keys[v] = f->keys[at < f->count ? at : 0];
        ahead[v] = next->keys[at < next->count ? at : 0];
    }
    for (int64_t i = 0; i < s->key_dim; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v += EACH_LINE)
            __builtin_prefetch(ahead[v] + i * s->key_stride, 0, 2);
        vec key[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) key[v] = load(keys[v] + i * s->key_stride);
#pragma GCC unroll 8
        for (int r = 0; r < num; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = fma_of(all(queries[r * s->key_dim + i]), key[v], sums[r][v]);
    }
    for (int r = 0; r < num; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            store(scores + r * STRETCH + v * LANES, sums[r][v]);
}

INLINE void score_tile(const int num, const struct shape *s, const float *queries,
                       const struct found *f, const struct found *next, float *scores) {
    if (s->key_stride != 1) {
        int64_t first = 0;
        for (; first < f->count; first += PANEL)
            score_turned(num, s, queries, f, next, first, scores + first);
        expect_turned(s, next, first);  // of a tile with more of them than this one
        return;
    }
    for (int64_t j = 0; j < f->count; j += LANES)
        score_few(num, s, queries, f->keys + j, f->count - j, scores + j);
}

// Adds the weighted values to the sums of `num` queries, PANEL columns from the `first` on.
INLINE void add_few(const int num, const float *weights, const struct found *f,
                    const struct found *next, int64_t first, int64_t columns, float *sums,
                    int64_t stride) {
    vec added[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < num; r++)
        for (int v = 0; v < TILE_VECTORS; v++) added[r][v] = load(sums + r * stride + v * LANES);
    for (int64_t j = 0; j < f->count; j++) {
        const float *row = f->values[j] + first;
        const float *ahead = next->values[j < next->count ? j : 0] + first;
        vec value[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            const int64_t left = columns - v * LANES;
            value[v] = left >= LANES ? load(row + v * LANES)
                       : left > 0    ? load_some(row + v * LANES, left)
                                     : (vec){0};
            if (v % EACH_LINE == 0) __builtin_prefetch(ahead + v * LANES, 0, 2);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                added[r][v] = fma_of(all(weights[r * STRETCH + j]), value[v], added[r][v]);
    }
    for (int64_t j = f->count; j < next->count; j++)  // of a tile with more of them than this one
        for (int v = 0; v < TILE_VECTORS; v += EACH_LINE)
            __builtin_prefetch(next->values[j] + first + v * LANES, 0, 2);
    for (int r = 0; r < num; r++)
        for (int v = 0; v < TILE_VECTORS; v++) store(sums + r * stride + v * LANES, added[r][v]);
}

// Up to TILE_ROWS queries: keys and values are read where they lie.
static void attend_few(const struct queries *q, const struct found *here, const struct found *next,
                       int64_t start, const struct desk *d) {
    const struct shape *s = q->shape;
    const int64_t skipped = start > q->position ? (start - q->position) * q->group : 0;
    const int64_t left = q->num - skipped;
    const float *queries = d->queries + skipped * s->key_dim;
    float *scores = d->scores + skipped * STRETCH;
#define SCORE(n) \
    case n: score_tile(n, s, queries, here, next, scores); break
    switch (left) {
        SCORE(1);
        SCORE(2);
        SCORE(3);
        SCORE(4);
        SCORE(5);
        SCORE(6);
    }
#undef SCORE
    soften_all(q, skipped, start, here->count, d);
    const int64_t stride = wide(s->value_dim);
#define ADD(n)                                                                              \
    case n:                                                                                 \
        add_few(n, scores, here, next, first, s->value_dim - first, sums, stride); \
        break
    for (int64_t first = 0; first < s->value_dim; first += PANEL) {
        float *sums = d->sums + skipped * stride + first;
        switch (left) {
            ADD(1);
            ADD(2);
            ADD(3);
            ADD(4);
            ADD(5);
            ADD(6);
        }
    }
#undef ADD
}

void finish(const struct queries *q, const struct desk *d, float *out) {
    const struct shape *s = q->shape;
    for (int64_t i = 0; i < q->num; i++) {
        const int64_t row = q->first_row + i / q->group;
        const int64_t head = q->kv_head * q->group + i % q->group;
        const float *sums = d->sums + i * wide(s->value_dim);
        float *to = out + row * s->out_stride + head * s->value_dim;
        for (int64_t c = 0; c < s->value_dim; c++) to[c] = sums[c] / d->totals[i];
    }
}

void attend_tile(const struct queries *q, const struct found *here, const struct found *next,
                 int64_t start, const struct desk *d) {
    if (q->num <= TILE_ROWS)
        attend_few(q, here, next, start, d);
    else
        attend_many(q, here, next, start, d);
}
