// A step of a decoder whose experts are in other processes, in one call. Its parts take turns: while the
// experts of one are computed elsewhere, the next one's attention is computed here.
#include <math.h>
#include <string.h>

#include "arena.h"
#include "compute/decoder_step.h"
#include "exchange/ring.h"

enum { DONE, FAILED };
static const int64_t MAX_BATCH_LOAD = 1ll << 30;  // a reply is believed up to here
static const double NEWEST_WEIGHS = 1.0 / 8;      // in the mean of the loads of a layer

// A part on its way.
struct turn {
    struct part *part;
    struct pass pass;
    const struct ask *ask;  // whose replies are awaited, or none
    struct asked asked;
    int64_t *basis, *loads;  // [2, basis_size], [N]
    float *node_sum;
};

static int several_nodes(const struct ask *ask) {
    return ask->node_of[0] != ask->node_of[ask->num - 1];
}

// Bytes that a part keeps beside its pass.
static int64_t turn_bytes(const struct decoder *d, const struct apart *apart,
                          const struct part *part) {
    int64_t basis = 0, nodes = 0;
    for (int64_t i = 0; i < d->num_layers; i++) {
        if (apart->asks[i].basis_size > basis) basis = apart->asks[i].basis_size;
        nodes |= several_nodes(&apart->asks[i]);
    }
    const int64_t rows = part->step.all.count * d->head.num_in * 4;
    return (2 * basis * 8 + apart->asks->num_workers * 8 + nodes * rows + 4 * 64) / 64 * 64;
}

EXPORT int64_t decoder_step_apart_scratch(const struct decoder *decoder, const struct apart *apart,
                                          const struct part *parts, int64_t num_parts,
                                          int threads) {
    int64_t bytes = (num_parts * (int64_t)sizeof(struct turn) + 127) / 64 * 64, most = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        const struct whole_step *step = &parts[p].step;
        const int64_t scratch = pass_scratch(decoder, step, threads);
        bytes += pass_bytes(decoder, step) + turn_bytes(decoder, apart, &parts[p]);
        if (scratch > most) most = scratch;
    }
    return bytes + most;
}

// Writes the basis of a batch, with the usual loads of those under way; returns its rows.
static int64_t fill_basis(const struct ask *ask, const struct turn *turns, int64_t num_turns,
                          int64_t *basis) {
    int others = 0;
    for (int64_t p = 0; p < num_turns; p++) others |= turns[p].ask != 0;
    memcpy(basis, ask->basis, (size_t)ask->basis_size * 8);
    if (!others || !ask->usual) return 1;
    int64_t *loads = basis + ask->basis_size;
    loads[0] = 0;
    for (int64_t i = 1; i < ask->basis_size; i++) {
        double busy = 0;
        for (int64_t p = 0; p < num_turns; p++) {
            const struct ask *other = turns[p].ask;
            if (other && other->usual && *other->known) busy += other->usual[ask->basis[i]];
        }
        loads[i] = (int64_t)rint(busy);
    }
    return 2;
}

// Counts the loads of a batch in the mean of each worker (`moesaic.dispatch.route.UsualLoads`).
static void learn(const struct ask *ask, const struct asked *asked) {
    if (asked->basis_rows < 2) return;
    for (int64_t n = 0; n < ask->num_workers; n++) {
        int64_t load = asked->loads[n];
        for (int64_t i = 1; i < ask->basis_size; i++)
            if (ask->basis[i] == n) load -= asked->basis[ask->basis_size + i];
        load = load < 0 ? 0 : load > MAX_BATCH_LOAD ? MAX_BATCH_LOAD : load;
        if (!*ask->known) ask->usual[n] = (double)load;
        ask->usual[n] += ((double)load - ask->usual[n]) * NEWEST_WEIGHS;
    }
    *ask->known = 1;
}

// Leaves an exchange to Python.
static void leave(const struct apart *apart, struct turn *turn, const struct ask *ask) {
    turn->part->layer = ask - apart->asks, turn->part->seq = turn->asked.seq;
    turn->part->deadline_ns = turn->asked.deadline_ns;
}

static int begin(struct apart *apart, struct turn *turns, int64_t num_turns, struct turn *turn) {
    const struct ask *ask = &apart->asks[turn->pass.layer - 1];
    const int64_t rows = turn->pass.rows->count;
    const int64_t times = rows > apart->patience_rows ? rows : apart->patience_rows;
    turn->asked = (struct asked){
        .id_low = apart->id_low,
        .id_high = apart->id_high,
        .seq = apart->seq,
        .rows = turn->pass.normed,
        .basis = turn->basis,
        .count = rows,
        .basis_rows = fill_basis(ask, turns, num_turns, turn->basis),
        .basis_size = ask->basis_size,
        .out = turn->pass.delta,
        .node_sum = turn->node_sum,
        .loads = turn->loads,
        .others = apart->others,
        .num_others = apart->num_others,
        .deadline_ns = now_ns() + apart->patience_ns / apart->patience_rows * times,
        .promises = turn->pass.rows->promises,
        .degraded = turn->pass.rows->promises ? degraded_in(&turn->pass) : 0,
    };
    apart->seq += (uint64_t)ask->num;
    if (ask_begin(ask, &turn->asked)) {
        leave(apart, turn, ask);
        return FAILED;
    }
    apart->send_ns += turn->asked.send_ns;
    turn->ask = ask;
    return DONE;
}

static int finish(struct apart *apart, struct turn *turn) {
    const struct ask *ask = turn->ask;
    turn->ask = 0;
    if (ask_finish(ask, &turn->asked, apart->bell)) {
        leave(apart, turn, ask);
        return FAILED;
    }
    const struct asked *asked = &turn->asked;
    apart->wait_ns += asked->wait_ns, apart->sum_ns += asked->sum_ns;
    const int64_t took = asked->send_ns + asked->wait_ns + asked->sum_ns;
    const int64_t beyond = took > asked->slowest_ns ? took - asked->slowest_ns : 0;
    apart->exchange_ns[apart->num_exchanges] = took;
    apart->beyond_ns[apart->num_exchanges++] = beyond;
    learn(ask, &turn->asked);
    return DONE;
}

// Moves a part on by a layer: to where it waits for experts, or to its end.
static int move(struct apart *apart, struct turn *turns, int64_t num_turns, struct turn *turn,
                float *const *caches) {
    struct pass *pass = &turn->pass;
    int failed;
    if (turn->ask && (failed = finish(apart, turn))) return failed;
    const int64_t started = now_ns();
    const int ends = pass->layer == pass->decoder->num_layers;
    if (ends)
        pass_end(pass, turn->part->logits);
    else
        pass_attend(pass, caches);
    apart->attend_ns += now_ns() - started;
    return ends ? DONE : begin(apart, turns, num_turns, turn);
}

EXPORT int decoder_step_apart(const struct decoder *decoder, struct apart *apart,
                              struct part *parts, int64_t num_parts, float *const *caches,
                              uint8_t *scratch, int threads) {
    struct arena arena = {scratch};
    struct turn *turns = take(&arena, num_parts * (int64_t)sizeof *turns);
    for (int64_t p = 0; p < num_parts; p++) {
        const struct whole_step *step = &parts[p].step;
        parts[p].layer = -1;
        turns[p] = (struct turn){
            .part = &parts[p],
            .pass = {.decoder = decoder, .step = step, .threads = threads},
        };
        pass_begin(&turns[p].pass, take(&arena, pass_bytes(decoder, step)));
        uint8_t *own = take(&arena, turn_bytes(decoder, apart, &parts[p]));
        int64_t basis = 0;
        for (int64_t i = 0; i < decoder->num_layers; i++)
            if (apart->asks[i].basis_size > basis) basis = apart->asks[i].basis_size;
        struct arena mine = {own};
        turns[p].basis = take(&mine, 2 * basis * 8);
        turns[p].loads = take(&mine, apart->asks->num_workers * 8);
        turns[p].node_sum = (float *)mine.next;
    }
    for (int64_t p = 0; p < num_parts; p++) turns[p].pass.scratch = arena.next;
    int failed = DONE;
    for (int64_t i = 0; i <= decoder->num_layers && !failed; i++)
        for (int64_t p = 0; p < num_parts && !failed; p++)
            failed = move(apart, turns, num_parts, &turns[p], caches);
    // The replies to the others are on their way; nobody else would know what to do with them.
    for (int64_t p = 0; p < num_parts; p++)
        if (turns[p].ask) finish(apart, &turns[p]);
    return failed;
}
