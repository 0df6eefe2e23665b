// Splits the choices of a batch between experts and united experts, by the rules of
// moesaic.brownout.split: equal to the reference to the last bit.
#include <stdlib.h>

#include "calls.h"
#include "arena.h"
#include "vector.h"

enum { UNITED, FEWER, NOTHING };  // what serves a degraded choice
enum { NOBODY = -1, MORE = 2 };
enum { WHOLE = 10000 };
enum { ID_BITS = 24 };  // of a key; the rest is the number of its rows

// Most rows first, then the lowest id.
static int by_rows(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

INLINE uint64_t key_of(int64_t rows, int64_t expert) {
    return (uint64_t)rows << ID_BITS | (~(uint64_t)expert & ((1 << ID_BITS) - 1));
}

INLINE int64_t expert_of(uint64_t key) { return (int64_t)(~key & ((1 << ID_BITS) - 1)); }

EXPORT int64_t split_choices_scratch(int64_t num_experts) {
    return num_experts * (8 + 8 + 4 + 4 + 1) + 5 * 64;
}

struct split {
    const int32_t *ids;
    int64_t count, top_k, num_experts;
    const struct promises *p;
    const struct substitution *substitution;
    uint64_t *keys;  // [E] of the experts that a phase's rows chose, those first that stay longest
    uint64_t *aside;  // [E]
    int32_t *rows;   // [E] of a phase; then, of a group, the experts that would go
    int32_t *place;  // [E] in that order
    uint8_t *stay;   // [E]
};

INLINE int64_t level_of(const struct split *s, int64_t row) {
    return s->p->level_of_row ? s->p->level_of_row[row] : 0;
}

// Orders experts by their places among those of their instance, and then as they are.
static void order_by_instances(struct split *s, int64_t chosen) {
    memset(s->rows, 0, (size_t)s->num_experts * sizeof *s->rows);  // of an instance: those seen so far
    for (int64_t i = 0; i < chosen; i++) {
        const uint64_t place = (uint64_t)s->rows[s->substitution->homes[expert_of(s->keys[i])]]++;
        s->aside[i] = key_of((int64_t)(~place & UINT32_MAX), i);
    }
    qsort(s->aside, (size_t)chosen, sizeof *s->aside, by_rows);
    for (int64_t i = 0; i < chosen; i++) s->aside[i] = s->keys[expert_of(s->aside[i])];
    memcpy(s->keys, s->aside, (size_t)chosen * sizeof *s->keys);
}

// Counts the rows of a phase by expert and puts the experts in order; returns how many are chosen.
static int64_t put_in_order(struct split *s, int32_t phase, int64_t *total) {
    memset(s->rows, 0, (size_t)s->num_experts * sizeof *s->rows);
    *total = 0;
    for (int64_t t = 0; t < s->count; t++) {
        if (s->p->phases[level_of(s, t)] != phase) continue;
        for (int64_t j = 0; j < s->top_k; j++) s->rows[s->ids[t * s->top_k + j]]++;
    }
    int64_t chosen = 0;
    for (int64_t e = 0; e < s->num_experts; e++) {
        if (!s->rows[e]) continue;
        s->keys[chosen++] = key_of(s->rows[e], e);
        *total += s->rows[e];
    }
    qsort(s->keys, (size_t)chosen, sizeof *s->keys, by_rows);
    if (s->substitution->homes) order_by_instances(s, chosen);
    for (int64_t i = 0; i < chosen; i++) s->place[expert_of(s->keys[i])] = (int32_t)i;
    return chosen;
}

// How many of the experts in order have the promised share of all choices: the fewest.
static int64_t promised(const struct split *s, int64_t threshold, int64_t chosen, int64_t total) {
    if (!threshold) return 0;
    int64_t reached = 0;
    for (int64_t i = 0; i < chosen; i++) {
        reached += (int64_t)(s->keys[i] >> ID_BITS);
        if (reached * WHOLE >= threshold * total) return i + 1;
    }
    return chosen;
}

static void keep_promised(struct split *s) {
    for (int64_t l = 0; l < s->p->num_levels; l++) {
        int known = 0;  // an earlier level of this phase has settled it
        for (int64_t before = 0; before < l; before++)
            known |= s->p->phases[before] == s->p->phases[l];
        if (known) continue;
        int64_t total;
        const int64_t chosen = put_in_order(s, s->p->phases[l], &total);
        for (int64_t m = l; m < s->p->num_levels; m++) {
            if (s->p->phases[m] != s->p->phases[l]) continue;
            const int64_t num = promised(s, s->p->thresholds[m], chosen, total);
            for (int64_t t = 0; num && t < s->count; t++) {
                if (level_of(s, t) != m) continue;
                for (int64_t j = 0; j < s->top_k; j++) {
                    const int32_t e = s->ids[t * s->top_k + j];
                    if (s->place[e] < num) s->stay[e] = 1;
                }
            }
        }
    }
}

static void leave_lost(struct split *s) {
    for (int64_t e = 0; s->substitution->lost && e < s->num_experts; e++)
        if (s->substitution->lost[e]) s->stay[e] = 0;
}

// An expert stays that would be the only one of its group to go.
static void keep_lone(struct split *s) {
    const int64_t way = s->substitution->way, groups = (s->num_experts + way - 1) / way;
    int32_t *lone = s->place;  // of a group: the expert that goes; MORE than one
    memset(s->rows, 0, (size_t)groups * sizeof *s->rows);
    for (int64_t i = 0; i < s->count * s->top_k; i++) {
        const int32_t e = s->ids[i], g = (int32_t)(e / way);
        if (s->stay[e] || s->rows[g] == MORE) continue;
        if (!s->rows[g])
            s->rows[g] = 1, lone[g] = e;
        else if (lone[g] != e)
            s->rows[g] = MORE;
    }
    for (int64_t g = 0; g < groups; g++)
        if (s->rows[g] == 1) s->stay[lone[g]] = 1;
}

// The choice that a row keeps in any case: the heaviest. -1 if it can keep none.
static int64_t heaviest_of(const struct split *s, const int32_t *ids, const float *weights) {
    int64_t best = -1;
    for (int64_t j = 0; j < s->top_k; j++) {
        if (s->substitution->lost && s->substitution->lost[ids[j]]) continue;
        if (best < 0 || weights[j] > weights[best] ||
            (weights[j] == weights[best] && ids[j] < ids[best]))
            best = j;
    }
    return best;
}

// Gives a row's degraded choices to united experts, each once with the sum of their weights.
static int32_t unite(const struct split *s, int32_t *ids, float *weights) {
    int32_t degraded = 0;
    for (int64_t j = 0; j < s->top_k; j++) {
        if (s->stay[ids[j]]) continue;
        degraded++;
        const int32_t united = (int32_t)(s->num_experts + ids[j] / s->substitution->way);
        int64_t first = 0;
        while (first < j && ids[first] != united) first++;
        ids[j] = united;
        if (first < j) weights[first] += weights[j], weights[j] = 0, ids[j] = NOBODY;
    }
    return degraded;
}

// Leaves a row's degraded choices out.
static int32_t leave_out(const struct split *s, int32_t *ids, float *weights) {
    const int64_t heaviest = s->substitution->instead == FEWER ? heaviest_of(s, ids, weights) : -1;
    int32_t degraded = 0;
    double whole = 0, kept = 0;
    for (int64_t j = 0; j < s->top_k; j++) {
        whole += weights[j];
        if (s->stay[ids[j]] || j == heaviest)
            kept += weights[j];
        else
            ids[j] = NOBODY, weights[j] = 0, degraded++;
    }
    if (s->substitution->instead == FEWER && degraded && kept > 0)
        for (int64_t j = 0; j < s->top_k; j++) weights[j] *= (float)(whole / kept);
    return degraded;
}

EXPORT void split_choices(int32_t *ids, float *weights, int64_t count, int64_t top_k,
                          const struct substitution *substitution, const struct promises *promises,
                          int32_t *degraded, uint8_t *scratch) {
    struct arena arena = {scratch};
    struct split s = {.ids = ids,
                      .count = count,
                      .top_k = top_k,
                      .num_experts = substitution->num_experts,
                      .p = promises,
                      .substitution = substitution};
    s.keys = take(&arena, s.num_experts * 8);
    s.aside = take(&arena, s.num_experts * 8);
    s.rows = take(&arena, s.num_experts * 4);
    s.place = take(&arena, s.num_experts * 4);
    s.stay = take(&arena, s.num_experts);
    memset(s.stay, 0, (size_t)s.num_experts);
    keep_promised(&s);
    leave_lost(&s);
    if (substitution->instead == UNITED) {
        keep_lone(&s);
        leave_lost(&s);
    }
    for (int64_t t = 0; t < count; t++) {
        int32_t *own = ids + t * top_k;
        float *weight = weights + t * top_k;
        degraded[t] += substitution->instead == UNITED ? unite(&s, own, weight)
                                                       : leave_out(&s, own, weight);
    }
}
