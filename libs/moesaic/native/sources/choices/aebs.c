// Chooses a replica for each activated expert of a batch, by the rules of
// moesaic.placement.schedule.aebs. Integers only, every tie goes to the lowest id: equal to the
// reference to the last one.
#include "calls.h"
#include "vector.h"

enum { NONE = -1, UNAVAILABLE = -2 };
enum { BITS = 64 };  // instances of one word of a set

struct schedule {
    const int64_t *weights, *row;  // [N]
    int64_t num_instances, words;  // words of a set of instances
    int64_t num_active;
    int32_t *active;    // activated experts, ascending
    int32_t *in_turn;   // those of them that anyone holds, in the order in which they choose
    int64_t num_turns;
    int32_t *tokens;    // [E]
    int32_t *num_held;  // [E] live holders; of activated experts
    uint64_t *held;     // [E] sets: the live holders
    int32_t *instance;  // [E]
    int64_t *load;      // [N]
};

EXPORT int64_t schedule_experts_scratch(int64_t num_experts, int64_t num_instances) {
    const int64_t words = (num_instances + BITS - 1) / BITS;
    return num_experts * (5 * 4 + words * 8)          // by expert
           + (3 * words + 1) * 8 + num_instances * 4  // live, the search
           + (num_instances + 2) * 4 + 16 * 64;       // how many have so many holders; alignment
}

static void *take(uint8_t **arena, int64_t bytes) {
    void *taken = *arena;
    *arena += (bytes + 63) / 64 * 64;
    return taken;
}

INLINE int64_t price_of(const struct schedule *s, int32_t expert, int64_t n) {
    const int64_t rows = s->tokens[expert] * s->row[n];
    return rows > s->weights[n] ? rows : s->weights[n];
}

// Finds the activated experts and the instances that could serve them.
static void find_holders(struct schedule *s, const int32_t *replicas, const uint64_t *live,
                         int64_t num_experts) {
    s->num_active = 0;
    for (int32_t e = 0; e < num_experts; e++) {
        s->instance[e] = s->tokens[e] ? UNAVAILABLE : NONE;
        if (!s->tokens[e]) continue;
        s->active[s->num_active++] = e;
        s->num_held[e] = 0;
        for (int64_t w = 0; w < s->words; w++) {
            const int32_t *row = replicas + e * s->num_instances + w * BITS;
            const int64_t left = s->num_instances - w * BITS, count = left < BITS ? left : BITS;
            uint64_t set = 0;
            for (int64_t n = 0; n < count; n++) set |= (uint64_t)(row[n] >= 0) << n;
            s->held[e * s->words + w] = set & live[w];
            s->num_held[e] += __builtin_popcountll(set & live[w]);
        }
    }
}

// Fewest holders first, then by id. `starts` [N + 2].
static void put_in_turn(struct schedule *s, int32_t *starts) {
    memset(starts, 0, (size_t)(s->num_instances + 2) * sizeof *starts);
    for (int64_t i = 0; i < s->num_active; i++) starts[s->num_held[s->active[i]] + 1]++;
    starts[1] = 0;  // nobody holds them: no turn
    for (int64_t n = 1; n <= s->num_instances; n++) starts[n + 1] += starts[n];
    s->num_turns = starts[s->num_instances + 1];
    for (int64_t i = 0; i < s->num_active; i++) {
        const int32_t e = s->active[i];
        if (s->num_held[e]) s->in_turn[starts[s->num_held[e]]++] = e;
    }
}

// Each to the holder whose load with it is least.
static void assign(struct schedule *s) {
    for (int64_t i = 0; i < s->num_turns; i++) {
        const int32_t e = s->in_turn[i];
        int64_t chosen = NONE, least = 0;
        for (int64_t w = 0; w < s->words; w++)
            for (uint64_t left = s->held[e * s->words + w]; left; left &= left - 1) {
                const int64_t n = w * BITS + __builtin_ctzll(left);
                const int64_t with_it = s->load[n] + price_of(s, e, n);
                if (chosen < 0 || with_it < least) chosen = n, least = with_it;
            }
        s->load[chosen] = least;
        s->instance[e] = (int32_t)chosen;
    }
}

// The cost of every expert that has a choice, everywhere; 0: costs differ, or are nothing.
static int64_t common_price(const struct schedule *s) {
    int64_t price = 0;
    for (int64_t i = 0; i < s->num_turns; i++) {
        const int32_t e = s->in_turn[i];
        if (s->num_held[e] < 2) continue;
        for (int64_t w = 0; w < s->words; w++)
            for (uint64_t left = s->held[e * s->words + w]; left; left &= left - 1) {
                const int64_t here = price_of(s, e, w * BITS + __builtin_ctzll(left));
                if (!here || (price && here != price)) return 0;
                price = here;
            }
    }
    return price;
}

// The findings of a search for a better schedule.
struct search {
    uint64_t *reached, *found;  // sets of instances
    int32_t *came;              // [N] which expert would move here
};

// Goes one step further from all instances reached; true if that reached another.
static int widen(const struct schedule *s, struct search *q) {
    memset(q->found, 0, (size_t)s->words * sizeof *q->found);
    uint64_t any = 0;
    for (int64_t i = 0; i < s->num_active; i++) {
        const int32_t e = s->active[i], at = s->instance[e];
        if (at < 0 || !(q->reached[at / BITS] >> at % BITS & 1)) continue;
        for (int64_t w = 0; w < s->words; w++) {
            const uint64_t new = s->held[e * s->words + w] & ~q->reached[w] & ~q->found[w];
            for (uint64_t left = new; left; left &= left - 1)
                q->came[w * BITS + __builtin_ctzll(left)] = e;
            q->found[w] |= new;
            any |= new;
        }
    }
    for (int64_t w = 0; w < s->words; w++) q->reached[w] |= q->found[w];
    return any != 0;
}

// Of those reached, the one with the least load among all that stay below `highest` with one
// expert more.
static int64_t room_within(const struct schedule *s, const struct search *q, int64_t price,
                           int64_t highest) {
    int64_t best = NONE;
    for (int64_t n = 0; n < s->num_instances; n++)
        if ((q->reached[n / BITS] >> n % BITS & 1) && s->load[n] + price < highest &&
            (best < 0 || s->load[n] < s->load[best]))
            best = n;
    return best;
}

// Moves experts, one making room for the next, so that one instance with the largest load has less;
// whether that was possible.
static int improve(struct schedule *s, struct search *q, const uint64_t *live, int64_t price) {
    int64_t start = NONE;
    for (int64_t n = 0; n < s->num_instances; n++)
        if ((live[n / BITS] >> n % BITS & 1) && (start < 0 || s->load[n] > s->load[start])) start = n;
    memset(q->reached, 0, (size_t)s->words * sizeof *q->reached);
    q->reached[start / BITS] |= 1ull << start % BITS;
    int64_t target = NONE;
    for (int growing = 1; growing && target < 0;) {
        growing = widen(s, q);
        target = room_within(s, q, price, s->load[start]);
    }
    if (target < 0) return 0;
    s->load[target] += price;
    s->load[start] -= price;
    while (target != start) {
        const int32_t e = q->came[target], from = s->instance[e];
        s->instance[e] = (int32_t)target;
        target = from;
    }
    return 1;
}

EXPORT void schedule_experts(const int32_t *ids, int64_t count, const int32_t *replicas,
                             int64_t num_experts, int64_t num_instances, const uint8_t *live,
                             const int64_t *weights, const int64_t *row, int64_t *load,
                             int32_t first, int32_t end, int32_t *instance, int32_t *replica,
                             int32_t *of_choice, uint8_t *scratch) {
    struct schedule s = {.weights = weights,
                         .row = row,
                         .num_instances = num_instances,
                         .words = (num_instances + BITS - 1) / BITS,
                         .instance = instance,
                         .load = load};
    const int64_t set_bytes = s.words * (int64_t)sizeof(uint64_t);
    s.active = take(&scratch, num_experts * 4);
    s.in_turn = take(&scratch, num_experts * 4);
    s.tokens = take(&scratch, num_experts * 4);
    s.num_held = take(&scratch, num_experts * 4);
    s.held = take(&scratch, num_experts * set_bytes);
    int32_t *served = take(&scratch, num_experts * 4);
    uint64_t *alive = take(&scratch, set_bytes);
    int32_t *starts = take(&scratch, (num_instances + 2) * 4);
    struct search search = {.reached = take(&scratch, set_bytes),
                            .found = take(&scratch, set_bytes),
                            .came = take(&scratch, num_instances * 4)};

    memset(s.tokens, 0, (size_t)num_experts * 4);
    for (int64_t i = 0; i < count; i++)
        if ((uint32_t)ids[i] < (uint64_t)num_experts) s.tokens[ids[i]]++;
    memset(alive, 0, (size_t)set_bytes);
    for (int64_t n = 0; n < num_instances; n++)
        alive[n / BITS] |= (uint64_t)(live[n] != 0) << n % BITS;
    find_holders(&s, replicas, alive, num_experts);
    put_in_turn(&s, starts);
    assign(&s);
    const int64_t price = common_price(&s);
    if (price)
        while (improve(&s, &search, alive, price)) continue;

    for (int64_t e = 0; e < num_experts; e++) {
        replica[e] = instance[e] < 0 ? NONE : replicas[e * num_instances + instance[e]];
        served[e] = replica[e] >= first && replica[e] < end ? replica[e] - first : NONE;
    }
    for (int64_t i = 0; i < count; i++)
        of_choice[i] = (uint32_t)ids[i] < (uint64_t)num_experts ? served[ids[i]] : NONE;
}
