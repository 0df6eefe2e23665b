// Advances a simulated fleet of edge servers: equal to moesaic_lab.simulation.edge.reference, which explains
// it, to the last bit. A binary heap of events; nothing else costs as much.
#include <math.h>
#include <stdlib.h>

#include "calls.h"

enum { BEGIN, DIVIDE, ASK, ANSWER, KINDS };
enum { SIZE, NUMBER, ARRIVED, EVENTS };
enum { LAYER_S, ROW_S, KEY_S, EXPERTS_S, EXPERT_S, CHOICE_S, HOP_S, MESSAGE_S, ROW_BYTES };
enum { NOBODY = -1 };

struct event {
    double at_s;
    int64_t number;
    double sent;
    int32_t code, site, choices, experts;
};

// What is used while one layer is divided; all 0 between.
struct desk {
    int32_t *of_expert;            // [E] choices
    int32_t *chosen;               // experts, in the order in which they were met
    int32_t *choices, *experts;    // [N] of a site
    int32_t *asked;                // sites, likewise
};

static int before(const struct event *a, const struct event *b) {
    return a->at_s < b->at_s || (a->at_s == b->at_s && a->number < b->number);
}

static void push(const struct edge_state *s, struct event event) {
    struct event *heap = s->heap;
    event.number = s->control[NUMBER]++;
    int64_t at = s->control[SIZE]++;
    while (at > 0) {
        const int64_t above = (at - 1) / 2;
        if (!before(&event, &heap[above])) break;
        heap[at] = heap[above];
        at = above;
    }
    heap[at] = event;
}

static struct event pop(const struct edge_state *s) {
    struct event *heap = s->heap;
    const struct event first = heap[0];
    const int64_t size = --s->control[SIZE];
    const struct event last = heap[size];
    int64_t at = 0;
    for (int64_t below = 1; below < size; below = 2 * at + 1) {
        if (below + 1 < size && before(&heap[below + 1], &heap[below])) below++;
        if (!before(&heap[below], &last)) break;
        heap[at] = heap[below];
        at = below;
    }
    if (size > 0) heap[at] = last;
    return first;
}

static double later(double a, double b) { return b > a ? b : a; }

static double compute(const struct edge_state *s, int32_t site, double at_s, double seconds) {
    int32_t gpu = s->first_gpu[site];
    for (int32_t g = gpu + 1; g < s->first_gpu[site + 1]; g++)
        if (s->gpu_free_s[g] < s->gpu_free_s[gpu]) gpu = g;
    s->gpu_busy_s[site] += seconds;
    return s->gpu_free_s[gpu] = later(at_s, s->gpu_free_s[gpu]) + seconds;
}

static double send(const struct edge_state *s, int32_t site, double at_s, double sent) {
    const double seconds = s->costs[MESSAGE_S] + sent * s->costs[ROW_BYTES] * s->byte_s[site];
    s->link_busy_s[site] += seconds;
    s->link_free_s[site] = later(at_s, s->link_free_s[site]) + seconds;
    return s->link_free_s[site] + s->costs[HOP_S];
}

static double experts_s(const struct edge_state *s, int32_t experts, int32_t choices) {
    return s->costs[EXPERTS_S] + experts * s->costs[EXPERT_S] + choices * s->costs[CHOICE_S];
}

static void attend(const struct edge_state *s, int32_t gpu, double at_s) {
    const double done_s = compute(s, s->site_of[gpu], at_s, s->attention_s[gpu]);
    push(s, (struct event){.at_s = done_s, .code = gpu * KINDS + DIVIDE});
}

static void new_pass(const struct edge_state *s, int32_t gpu, double at_s) {
    const int32_t site = s->site_of[gpu];
    int32_t *members = s->members + gpu * s->running;
    int32_t count = s->num_members[gpu];
    for (; count < s->running && s->first_waiting[site] != NOBODY; count++) {
        const int32_t request = s->first_waiting[site];
        s->first_waiting[site] = s->next_waiting[request];
        s->begun_s[request] = at_s;
        members[count] = request;
    }
    s->num_members[gpu] = count;
    if (count == 0) return;
    double rows = 0.0, keys = 0.0;
    for (int32_t m = 0; m < count; m++) {
        const double prompt = s->tokens[s->prompt[members[m]]];
        const int32_t done = s->passes[members[m]];
        rows += done == 0 ? prompt : 1.0;
        keys += done == 0 ? prompt * (prompt + 1.0) * 0.5 : prompt + done;
    }
    s->attention_s[gpu] = s->costs[LAYER_S] + rows * s->costs[ROW_S] + keys * s->costs[KEY_S];
    s->layer[gpu] = 0;
    attend(s, gpu, at_s);
}

static void arrive(const struct edge_state *s, int32_t request) {
    const int32_t site = s->site[request];
    if (s->first_waiting[site] == NOBODY)
        s->first_waiting[site] = request;
    else
        s->next_waiting[s->last_waiting[site]] = request;
    s->last_waiting[site] = request;
    for (int32_t gpu = s->first_gpu[site]; gpu < s->first_gpu[site + 1]; gpu++)
        if (s->num_members[gpu] == 0) {
            new_pass(s, gpu, s->at_s[request]);
            return;
        }
}

static void begin(const struct edge_state *s, int32_t gpu, double at_s) {
    if (s->layer[gpu] < s->num_layers) {
        attend(s, gpu, at_s);
        return;
    }
    int32_t *members = s->members + gpu * s->running, staying = 0;
    for (int32_t m = 0; m < s->num_members[gpu]; m++) {
        const int32_t request = members[m];
        if (++s->passes[request] == 1) s->first_s[request] = at_s;
        if (s->passes[request] > s->answers[request])
            s->end_s[request] = at_s;
        else
            members[staying++] = request;
    }
    s->num_members[gpu] = staying;
    new_pass(s, gpu, at_s);
}

static int64_t pass_of(const struct edge_state *s, int32_t request) {
    if (s->passes[request] == 0) return s->prompt[request];
    const int64_t nth = (int64_t)s->start[request] + s->passes[request] - 1;
    return s->pool[request] + nth % s->num_answers;
}

static double gather(const struct edge_state *s, const struct desk *d, int32_t gpu,
                     int64_t *num_chosen) {
    const int32_t layer = s->layer[gpu];
    double total = 0.0;
    for (int32_t m = 0; m < s->num_members[gpu]; m++) {
        const int64_t pass = pass_of(s, s->members[gpu * s->running + m]);
        const int64_t place = pass * s->num_layers + layer;
        total += s->tokens[pass];
        for (int64_t entry = s->offsets[place]; entry < s->offsets[place + 1]; entry++) {
            const int32_t expert = s->experts[entry];
            if (d->of_expert[expert] == 0) d->chosen[(*num_chosen)++] = expert;
            d->of_expert[expert] += s->rows[entry];
        }
    }
    return total;
}

static void divide(const struct edge_state *s, const struct desk *d, int32_t gpu, double at_s) {
    const int32_t home = s->site_of[gpu], layer = s->layer[gpu];
    const int32_t *holder = s->holder + (home * s->num_layers + layer) * s->num_experts;
    int64_t num_chosen = 0, num_asked = 0;
    const double total = gather(s, d, gpu, &num_chosen);
    for (int64_t n = 0; n < num_chosen; n++) {
        const int32_t expert = d->chosen[n], site = holder[expert];
        if (d->experts[site]++ == 0) d->asked[num_asked++] = site;
        d->choices[site] += d->of_expert[expert];
        d->of_expert[expert] = 0;
    }
    s->layer[gpu] = layer + 1;
    s->done_s[gpu] = at_s;
    s->pending[gpu] = (int32_t)num_asked - (d->experts[home] > 0);
    for (int64_t n = 0; n < num_asked; n++) {
        const int32_t site = d->asked[n], rows = d->choices[site], experts = d->experts[site];
        d->choices[site] = d->experts[site] = 0;
        if (site == home) {
            s->done_s[gpu] = compute(s, home, at_s, experts_s(s, experts, rows));
            s->local[home] += rows;
            continue;
        }
        const double absent = 1.0 - rows / (total * s->top_k);
        double part = 1.0;
        for (int64_t k = 0; k < s->top_k; k++) part *= absent;
        const double sent = later(1.0, total * (1.0 - part));
        const double there_s = send(s, home, at_s, sent);
        s->remote[home] += rows;
        s->messages[home]++;
        push(s, (struct event){.at_s = there_s, .sent = sent, .code = gpu * KINDS + ASK,
                               .site = site, .choices = rows, .experts = experts});
    }
    if (s->pending[gpu] == 0)
        push(s, (struct event){.at_s = s->done_s[gpu], .code = gpu * KINDS + BEGIN});
}

static void ask(const struct edge_state *s, struct event event) {
    event.at_s = compute(s, event.site, event.at_s, experts_s(s, event.experts, event.choices));
    event.code += ANSWER - ASK;
    push(s, event);
}

static void answer(const struct edge_state *s, const struct event *event) {
    const int32_t gpu = event->code / KINDS;
    const double there_s = send(s, event->site, event->at_s, event->sent);
    s->done_s[gpu] = later(s->done_s[gpu], there_s);
    if (--s->pending[gpu] == 0)
        push(s, (struct event){.at_s = s->done_s[gpu], .code = gpu * KINDS + BEGIN});
}

static void run(const struct edge_state *s, const struct desk *d, double until_s) {
    const struct event *heap = s->heap;
    int64_t *arrived = &s->control[ARRIVED];
    for (;; s->control[EVENTS]++) {
        const double next_s = *arrived < s->num_requests ? s->at_s[*arrived] : INFINITY;
        if (s->control[SIZE] > 0 && heap[0].at_s < next_s) {
            if (!(heap[0].at_s < until_s)) return;
            const struct event event = pop(s);
            const int32_t gpu = event.code / KINDS;
            switch (event.code % KINDS) {
                case BEGIN: begin(s, gpu, event.at_s); break;
                case DIVIDE: divide(s, d, gpu, event.at_s); break;
                case ASK: ask(s, event); break;
                default: answer(s, &event);
            }
        } else {
            if (!(next_s < until_s)) return;
            arrive(s, (int32_t)(*arrived)++);
        }
    }
}

EXPORT int advance_edge(const struct edge_state *state, const double *until_s) {
    const int64_t e = state->num_experts, n = state->num_sites;
    int32_t *room = calloc((size_t)(2 * e + 3 * n), sizeof *room);
    if (room == NULL) return -1;
    const struct desk desk = {room, room + e, room + 2 * e, room + 2 * e + n, room + 2 * e + 2 * n};
    run(state, &desk, *until_s);
    free(room);
    return 0;
}
