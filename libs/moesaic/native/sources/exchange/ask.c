// Asks expert workers for their parts of a layer, and adds them up, as moesaic.dispatch.routed does, to
// the bit. Whatever is not a plain reply is kept for Python, which then settles the whole exchange.
#define _GNU_SOURCE
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "compute/pool.h"
#include "exchange/answer.h"
#include "exchange/frame.h"
#include "exchange/int8_rows.h"
#include "exchange/promised.h"

enum { DONE, RARE, LATE };
enum { AWAITED, PART, OTHER };
enum { MOST_ASKED = 64 };
enum { LOOK_AT_OTHERS_NS = 20 * 1000 * 1000 };
enum { LARGE = 1 << 14 };  // numbers of a reply; to check these takes longer than to wake up for it

// A reply where it came; `kept` if it came while another one was awaited.
struct reply {
    int state;
    const uint8_t *message;
    int64_t size;
    struct kept *kept;
    struct frame_head head;
};

EXPORT int64_t most_asked(void) { return MOST_ASKED; }

static struct channel *channel_of(const struct ask *ask, int64_t i) { return ask->channels[i]; }

// Columns of rows and sums as they travel.
static int64_t columns_of(const struct ask *ask) {
    return ask->hidden + (ask->code == FRAME_INT8 ? SCALE_BYTES : 0);
}

static int64_t row_bytes(const struct ask *ask) {
    return columns_of(ask) * (ask->code == FRAME_FLOAT32 ? 4 : ask->code == FRAME_BFLOAT16 ? 2 : 1);
}

static void fill(struct frame_head *head, const struct ask *ask, const struct asked *asked) {
    *head = (struct frame_head){.kind = FRAME_REQUEST,
                                .num_tensors = 2,
                                .layer = (int32_t)ask->layer,
                                .threshold = lowest_threshold(asked->promises),
                                .epoch = ask->epoch,
                                .flags = asked->promises ? FRAME_PROMISED : 0,
                                .body_size = promises_size(asked->promises, asked->count)};
    memcpy(head->request_id, &asked->id_low, 8);
    memcpy(head->request_id + 8, &asked->id_high, 8);
    head->tensors[0] = (struct tensor_place){(uint32_t)ask->code, (uint32_t)asked->count,
                                             (uint32_t)columns_of(ask), 0};
    head->tensors[1] =
        (struct tensor_place){FRAME_INT64, (uint32_t)asked->basis_rows, (uint32_t)asked->basis_size, 0};
    frame_lay_out(head);
}

EXPORT int ask_begin(const struct ask *ask, struct asked *asked) {
    struct frame_head head;
    const int64_t started = now_ns();
    pool_rest();  // the cores are the experts' now
    fill(&head, ask, asked);
    const int64_t size = frame_size(&head);
    uint8_t *copy = 0;
    int failed = 0;
    for (int64_t i = 0; i < ask->num; i++) channel_of(ask, i)->outstanding++;
    for (int64_t i = 0; i < ask->num; i++) {
        struct channel *c = ask->channels[i];
        uint8_t *room = channel_room(c, size), *to = room;
        if (!to && !(to = copy ? copy : (copy = aligned_alloc(64, (size_t)(size + 63) / 64 * 64)))) {
            failed = -1;
            break;
        }
        head.seq = asked->seq + (uint64_t)i;
        // Packed anew for each: what a ring holds could have been changed by then.
        if (ask->code == FRAME_INT8)
            pack_int8_rows(asked->rows, asked->count, ask->hidden,
                           (int8_t *)to + head.tensors[0].start);
        else
            memcpy(to + head.tensors[0].start, asked->rows,
                   (size_t)(asked->count * row_bytes(ask)));
        memcpy(to + head.tensors[1].start, asked->basis,
               (size_t)(asked->basis_rows * asked->basis_size) * sizeof(int64_t));
        write_promises(to + head.body_start, asked->promises, asked->count);
        frame_seal(to, &head);
        if (room)
            channel_put(c, size);
        else
            channel_send(c, to, size);
    }
    free(copy);
    // Only now, and those last that slept on this core: they may take it, and keep the others waiting. At
    // last all of them: a second look at a core may find another one, and would pass over its peer.
    const uint32_t core = this_core();
    for (int64_t i = 0; i < ask->num; i++)
        if (channel_core(ask->channels[i]) != core) channel_tell(ask->channels[i]);
    for (int64_t i = 0; i < ask->num; i++) channel_tell(ask->channels[i]);
    asked->send_ns = now_ns() - started;
    return failed;
}

static int is_part(const struct ask *ask, const struct asked *asked, int64_t i,
                   const struct frame_head *head) {
    const int has_loads = asked->basis_rows == 2, is_promised = asked->promises != 0;
    const struct tensor_place *part = &head->tensors[0], *loads = &head->tensors[1];
    const struct tensor_place *degraded = &head->tensors[1 + has_loads];
    return head->kind == FRAME_REPLY && head->seq == asked->seq + (uint64_t)i &&
           head->epoch == ask->epoch && head->layer == ask->layer &&
           !memcmp(head->request_id, &asked->id_low, 8) &&
           !memcmp(head->request_id + 8, &asked->id_high, 8) &&
           head->num_tensors == 1 + has_loads + is_promised && part->code == ask->code &&
           part->cols == columns_of(ask) && (part->rows == asked->count || !part->rows) &&
           (!has_loads || (loads->code == FRAME_INT64 && loads->rows == 1 &&
                           loads->cols == ask->num_workers)) &&
           (!is_promised || (degraded->code == FRAME_INT8 && degraded->rows == asked->count &&
                             degraded->cols == 1));
}

// Reads a message if it answers call `i`; else it is for another.
static int is_mine(const struct ask *ask, const struct asked *asked, int64_t i,
                   const uint8_t *message, int64_t size, struct reply *reply) {
    const struct frame_limits limits = {ask->max_rows, ask->max_cols, ask->max_bytes};
    if (frame_read(message, size, &limits, &reply->head)) {
        reply->state = OTHER;  // damage, which ends the channel
        return 0;
    }
    if (reply->head.kind != FRAME_REPLY && reply->head.kind != FRAME_ERROR) return 0;
    if (reply->head.seq != asked->seq + (uint64_t)i) return 0;
    reply->state = is_part(ask, asked, i, &reply->head) ? PART : OTHER;
    reply->message = message, reply->size = size;
    return 1;
}

static void look_at_kept(const struct ask *ask, const struct asked *asked, int64_t i,
                         struct reply *reply) {
    for (struct kept **at = &channel_of(ask, i)->kept; *at; at = &(*at)->next)
        if (is_mine(ask, asked, i, (*at)->bytes, (*at)->size, reply)) {
            if (reply->state == OTHER) return;  // it stays for Python
            reply->kept = *at;
            *at = reply->kept->next;
            return;
        }
}

static void look(const struct ask *ask, const struct asked *asked, int64_t i, struct reply *reply) {
    struct channel *c = ask->channels[i];
    int64_t size;
    const uint8_t *message;
    channel_pump(c);
    while (reply->state == AWAITED && (message = channel_peek(c, &size))) {
        const int mine = is_mine(ask, asked, i, message, size, reply);
        if (mine && reply->state == PART) return;  // it is released when it has been added
        channel_keep(c, message, size);
        channel_release(c);
    }
}

// Has the peers ring that answer; of small replies only the one that is likely the last, as waking up for
// each takes a core from those that still compute. False if there is something to do already.
static int may_sleep(const struct ask *ask, const struct asked *asked,
                     const struct reply *replies) {
    const int all = asked->count * columns_of(ask) > LARGE;
    int64_t last = -1;
    for (int64_t i = 0; i < ask->num; i++)
        if (replies[i].state == AWAITED && (last < 0 || channel_of(ask, i)->comes_last)) last = i;
    for (int64_t i = 0; i < ask->num; i++) {
        struct channel *c = ask->channels[i];
        if (replies[i].state != AWAITED) continue;
        // What waits for room in a ring, and other carriers, may need this side meanwhile.
        if ((all || i == last || c->carrier || c->first) && !channel_sleep(c)) return 0;
    }
    return 1;
}

// Sleeps until a peer rings, a connection ends, or the deadline; true if a connection ended.
static int sleep_on(const struct ask *ask, const struct asked *asked, const struct reply *replies,
                    int bell, int64_t timeout_ns) {
    struct pollfd fds[2 * MOST_ASKED + 1];
    fds[0] = (struct pollfd){.fd = bell, .events = POLLIN};
    int count = 1, controls;
    if (!may_sleep(ask, asked, replies)) return 0;
    for (int64_t i = 0; i < ask->num; i++)
        if (replies[i].state == AWAITED)
            fds[count++] = (struct pollfd){.fd = channel_of(ask, i)->control, .events = POLLIN};
    controls = count;
    for (int64_t i = 0; i < ask->num; i++)
        if (replies[i].state == AWAITED && channel_of(ask, i)->carrier)
            fds[count++] =
                (struct pollfd){.fd = channel_descriptor(ask->channels[i]), .events = POLLIN};
    const struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    if (ppoll(fds, (nfds_t)count, &timeout, 0) <= 0) return 0;
    if (fds[0].revents) quiet(bell);
    for (int i = 1; i < controls; i++)
        if (fds[i].revents) return 1;
    return 0;
}

// Answers pings of peers that dialled this process: while it computes a step, nobody else would. They
// ring for the next one.
static void answer_others(const struct asked *asked) {
    channel_turn();
    for (int64_t i = 0; i < asked->num_others; i++) {
        struct channel *c = asked->others[i];
        int64_t size;
        const uint8_t *message;
        if (!c->answers) continue;
        channel_pump(c);
        if ((message = channel_peek(c, &size)) && answer(c->answers, c, message, size))
            channel_release(c);
        if (!c->carrier) channel_sleep(c);
    }
}

static void add_part(float *sum, const float *part, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] += part[i];
}

// A bfloat16 is the upper half of a float32.
static void add_bfloat16_part(float *sum, const uint16_t *part, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)part[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        sum[i] += value;
    }
}

// A sum begins with zeros, so not even the sign of a zero depends on its parts.
static void begin_sum(float *sum, const float *part, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] = 0.0f + part[i];
}

static void add_reply(const struct ask *ask, const struct asked *asked, const struct reply *reply,
                      float *sum, int begun) {
    const int64_t count = asked->count * ask->hidden;
    const uint8_t *part = reply->message + reply->head.tensors[0].start;
    if (ask->code == FRAME_FLOAT32) {
        (begun ? add_part : begin_sum)(sum, (const float *)part, count);
        return;
    }
    if (!begun) memset(sum, 0, (size_t)count * sizeof(float));
    if (ask->code == FRAME_BFLOAT16)
        add_bfloat16_part(sum, (const uint16_t *)part, count);
    else
        add_int8_rows(sum, (const int8_t *)part, asked->count, ask->hidden);
}

// The sum of the replies up to `next`, in the order of moesaic.dispatch.sum_order: node by node, workers of a
// node first. `begun`: the sum has a part; `node_begun`: so has that of the node.
struct sum {
    int64_t next;
    int begun, node_begun;
};

static void add_next(const struct ask *ask, const struct asked *asked, const struct reply *replies,
                     struct sum *sum) {
    const int64_t count = asked->count * ask->hidden, n = sum->next++;
    const int one_node = ask->node_of[0] == ask->node_of[ask->num - 1], is_last = n == ask->num - 1;
    const struct reply *reply = &replies[ask->order[n]];
    float *to = one_node ? asked->out : asked->node_sum;
    if (reply->head.tensors[0].rows) {
        add_reply(ask, asked, reply, to, sum->node_begun);
        sum->node_begun = 1;
    }
    if (!one_node && sum->node_begun && (is_last || ask->node_of[n] != ask->node_of[n + 1])) {
        (sum->begun ? add_part : begin_sum)(asked->out, to, count);
        sum->begun = 1, sum->node_begun = 0;
    }
    if (is_last && !sum->begun && !sum->node_begun) memset(asked->out, 0, (size_t)count * sizeof(float));
}

// Adds replies up to the first one that is missing: while others are computed, these cost no time.
static void add_what_came(const struct ask *ask, struct asked *asked, const struct reply *replies,
                          struct sum *sum) {
    const int64_t started = now_ns();
    while (sum->next < ask->num && replies[ask->order[sum->next]].state == PART)
        add_next(ask, asked, replies, sum);
    asked->sum_ns += now_ns() - started;
}

static int wait_for(const struct ask *ask, struct asked *asked, struct reply *replies, int bell) {
    static _Thread_local int64_t looked;
    const int64_t began = now_ns();
    int64_t last = -1;
    struct sum sum = {0};
    if (began - looked > LOOK_AT_OTHERS_NS) looked = began, answer_others(asked);
    for (;;) {
        int missing = 0, broken = 0;
        channel_turn();
        for (int64_t i = 0; i < ask->num; i++) {
            if (replies[i].state == AWAITED) {
                look(ask, asked, i, &replies[i]);
                if (replies[i].state != AWAITED) last = i;
            }
            missing += replies[i].state == AWAITED;
            broken |= channel_of(ask, i)->broken;
        }
        add_what_came(ask, asked, replies, &sum);
        if (!missing) {
            for (int64_t i = 0; i < ask->num; i++) channel_of(ask, i)->comes_last = i == last;
            return DONE;
        }
        if (broken) return RARE;
        const int64_t now = now_ns();
        if (now >= asked->deadline_ns) return LATE;
        if (sleep_on(ask, asked, replies, bell, asked->deadline_ns - now)) return RARE;
        answer_others(asked);
    }
}

static int agree(const struct ask *ask, const struct reply *replies) {
    for (int64_t i = 0; i < ask->num; i++)
        if (replies[i].state != PART || replies[i].head.digest != replies[0].head.digest) return 0;
    return 1;
}

EXPORT void ask_end(const struct ask *ask) {
    for (int64_t i = 0; i < ask->num; i++) channel_of(ask, i)->outstanding--;
}

// Of workers that agree, one tells how many choices of each row are degraded.
static void count_degraded(const struct asked *asked, const struct reply *reply) {
    const struct tensor_place *counts = &reply->head.tensors[reply->head.num_tensors - 1];
    const int8_t *each = (const int8_t *)(reply->message + counts->start);
    for (int64_t t = 0; t < asked->count; t++) asked->degraded[t] += each[t];
}

EXPORT int ask_finish(const struct ask *ask, struct asked *asked, int bell) {
    struct reply replies[MOST_ASKED] = {0};
    const int64_t started = now_ns();
    asked->slowest_ns = asked->sum_ns = 0;
    for (int64_t i = 0; i < ask->num; i++) look_at_kept(ask, asked, i, &replies[i]);
    int outcome = wait_for(ask, asked, replies, bell);
    asked->wait_ns = now_ns() - started - asked->sum_ns;
    if (outcome == DONE && !agree(ask, replies)) outcome = RARE;
    if (outcome == DONE) {
        if (asked->promises) count_degraded(asked, &replies[0]);
        if (asked->basis_rows == 2)
            memcpy(asked->loads, replies[0].message + replies[0].head.tensors[1].start,
                   (size_t)ask->num_workers * sizeof(int64_t));
    }
    for (int64_t i = 0; i < ask->num; i++) {
        struct reply *reply = &replies[i];
        if (reply->state != PART) continue;
        if (reply->head.took_ns > asked->slowest_ns) asked->slowest_ns = reply->head.took_ns;
        if (outcome == DONE && ask->took_ns) ask->took_ns[i] += reply->head.took_ns;
        if (outcome != DONE) channel_keep(ask->channels[i], reply->message, reply->size);
        if (reply->kept)
            free(reply->kept);
        else
            channel_release(ask->channels[i]);
    }
    if (outcome == DONE) ask_end(ask);
    return outcome;
}
