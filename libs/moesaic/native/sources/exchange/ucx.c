// UCX is called through the library that its Python bindings have loaded, for it is no part of a machine
// without them. What is declared here is compared with UCX's own headers in tests.
#define _GNU_SOURCE
#include "exchange/ucx.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "exchange/ring.h"
#include "exchange/ucx_calls.h"

static struct {
    ucp_progress_function *progress;
    ucp_arm_function *arm;
    ucp_probe_function *probe;
    ucp_receive_function *receive;
    ucp_send_function *send;
    ucp_free_function *free;
} ucp;

struct ucx_plane {
    void *worker;
    int descriptor;
    int64_t most;  // bytes of a message
    struct channel *channels;
    uint64_t moved_at, armed_at;  // turns
    int armed;
};

struct outbound {  // a message that UCX has not sent yet
    struct ucx_plane *plane;
    uint64_t tag;
    _Alignas(64) uint8_t bytes[];
};

static int find_functions(void) {
    if (ucp.free) return 1;
    void *library = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
#define FIND(name, symbol) *(void **)&ucp.name = dlsym(library, symbol)
    FIND(progress, "ucp_worker_progress");
    FIND(arm, "ucp_worker_arm");
    FIND(probe, "ucp_tag_probe_nb");
    FIND(receive, "ucp_tag_msg_recv_nbx");
    FIND(send, "ucp_tag_send_nbx");
    FIND(free, "ucp_request_free");
#undef FIND
    return ucp.progress && ucp.arm && ucp.probe && ucp.receive && ucp.send && ucp.free;
}

EXPORT void *ucx_plane_open(void *worker, int descriptor, int64_t most) {
    struct ucx_plane *plane = find_functions() ? calloc(1, sizeof *plane) : 0;
    if (plane) *plane = (struct ucx_plane){.worker = worker, .descriptor = descriptor, .most = most};
    return plane;
}

// UCX may still tell of messages that are on their way: the plane stays, it is a few bytes.
EXPORT void ucx_plane_close(void *plane) { ((struct ucx_plane *)plane)->worker = 0; }

static const struct carrier ucx_carrier;

EXPORT void *channel_open_ucx(void *plane, void *endpoint, uint64_t send_tag, uint64_t receive_tag,
                              int control) {
    struct channel *c = calloc(1, sizeof *c);
    struct ucx_end *end = calloc(1, sizeof *end);
    if (!c || !end) {
        free(c), free(end);
        return 0;
    }
    struct ucx_plane *p = plane;
    *end = (struct ucx_end){.plane = p,
                            .endpoint = endpoint,
                            .send_tag = send_tag,
                            .receive_tag = receive_tag,
                            .linked = 1,
                            .next = p->channels};
    c->carrier = &ucx_carrier, c->ucx = end, c->control = control, c->bell = -1, c->most = p->most;
    p->channels = c;
    return c;
}

static struct channel *channel_by_tag(struct ucx_plane *plane, uint64_t tag, int sends) {
    for (struct channel *c = plane->channels; c; c = c->ucx->next)
        if ((sends ? c->ucx->send_tag : c->ucx->receive_tag) == tag) return c;
    return 0;
}

// Everything that UCX's callbacks may meet is settled here, on their thread; a channel may be freed on any.
EXPORT void channel_unlink(void *channel) {
    struct channel *c = channel;
    if (!c->ucx || !c->ucx->linked) return;
    c->ucx->linked = 0, c->ucx->endpoint = 0;
    for (struct channel **at = &c->ucx->plane->channels; *at; at = &(*at)->ucx->next)
        if (*at == c) {
            *at = c->ucx->next;
            break;
        }
    for (struct inbound *in = c->ucx->first, *next; in; in = next) {
        next = in->next;
        if (in->done)
            free(in);
        else
            in->orphan = 1;
    }
    c->ucx->first = c->ucx->last = 0;
}

static void ucx_end(struct channel *c) {
    channel_unlink(c);
    if (c->ucx->room) free(c->ucx->room - offsetof(struct outbound, bytes));
    free(c->ucx);
}

static void end_receive(struct inbound *in, int status) {
    in->done = 1, in->failed = status != 0;
    if (in->orphan) free(in);
}

static void received(void *request, signed char status, const struct ucp_tag_info *info,
                     void *with) {
    (void)info;
    ucp.free(request);
    end_receive(with, status);
}

static void dropped(void *request, signed char status, const struct ucp_tag_info *info,
                    void *with) {
    (void)status, (void)info, (void)with;
    ucp.free(request);
}

// One byte suffices to be rid of a message: UCX drops what does not fit.
static void drop(struct ucx_plane *plane, void *message) {
    static uint8_t sink[1];
    const struct ucp_param param = {.mask = WITH_CALLBACK, .callback.receive = dropped};
    ucp.receive(plane->worker, sink, sizeof sink, message, &param);
}

static void receive(struct ucx_plane *plane, struct channel *c, void *message, int64_t size) {
    struct inbound *in = aligned_alloc(64, (sizeof *in + (size_t)size + 63) / 64 * 64);
    if (!in) {
        c->broken = 1;
        drop(plane, message);
        return;
    }
    *in = (struct inbound){.size = size};
    if (c->ucx->last)
        c->ucx->last->next = in;
    else
        c->ucx->first = in;
    c->ucx->last = in;
    const struct ucp_param param = {
        .mask = WITH_CALLBACK | WITH_DATA, .callback.receive = received, .data = in};
    void *request = ucp.receive(plane->worker, in->bytes, (size_t)size, message, &param);
    if (!IS_REQUEST(request)) end_receive(in, (int)(intptr_t)request);
}

static int progress(struct ucx_plane *plane) {
    struct ucp_tag_info info;
    void *message;
    if (!plane->worker) return 0;
    int moved = ucp.progress(plane->worker) != 0;
    while ((message = ucp.probe(plane->worker, 0, 0, 1, &info))) {
        struct channel *c = channel_by_tag(plane, info.tag, 0);
        moved = 1;
        if (!c || c->broken) {
            drop(plane, message);
        } else if (!info.length || info.length > (uint64_t)plane->most) {
            c->broken = 1, c->excess = (int64_t)info.length;
            drop(plane, message);
        } else {
            receive(plane, c, message, (int64_t)info.length);
        }
    }
    return moved;
}

EXPORT int ucx_plane_progress(void *plane) { return progress(plane); }

static int ucx_progress(struct channel *c) {
    struct ucx_plane *plane = c->ucx->plane;
    if (plane->moved_at == this_turn()) return 0;
    plane->moved_at = this_turn();
    return progress(plane);
}

static const uint8_t *ucx_peek(struct channel *c, int64_t *size) {
    struct inbound *in = c->ucx->first;
    if (!in || !in->done) return 0;
    if (in->failed) {
        c->broken = 1;
        return 0;
    }
    *size = in->size;
    return in->bytes;
}

static void ucx_release(struct channel *c) {
    struct inbound *in = c->ucx->first;
    c->ucx->first = in->next;
    if (!in->next) c->ucx->last = 0;
    free(in);
}

static int ucx_is_ready(const struct channel *c) { return c->ucx->first && c->ucx->first->done; }

static uint8_t *ucx_room(struct channel *c, int64_t size) {
    struct outbound *out =
        c->ucx->endpoint ? aligned_alloc(64, (sizeof *out + (size_t)size + 63) / 64 * 64) : 0;
    if (!out) return 0;
    *out = (struct outbound){c->ucx->plane, c->ucx->send_tag};
    return c->ucx->room = out->bytes;
}

static void end_send(struct outbound *out, int status) {
    struct channel *c = status ? channel_by_tag(out->plane, out->tag, 1) : 0;
    if (c) c->broken = 1;
    free(out);
}

static void sent(void *request, signed char status, void *with) {
    ucp.free(request);
    end_send(with, status);
}

static void ucx_commit(struct channel *c, int64_t size) {
    struct outbound *out = (void *)(c->ucx->room - offsetof(struct outbound, bytes));
    const struct ucp_param param = {
        .mask = WITH_CALLBACK | WITH_DATA, .callback.send = sent, .data = out};
    c->ucx->room = 0;
    void *request = ucp.send(c->ucx->endpoint, out->bytes, (size_t)size, out->tag, &param);
    if (!IS_REQUEST(request)) end_send(out, (int)(intptr_t)request);
}

static int ucx_sleep(struct channel *c) {
    struct ucx_plane *plane = c->ucx->plane;
    if (!plane->worker) return 1;
    if (plane->armed_at != this_turn()) {
        plane->armed_at = this_turn();
        plane->armed = ucp.arm(plane->worker) == 0;
    }
    return plane->armed;
}

static int ucx_descriptor(const struct channel *c) { return c->ucx->plane->descriptor; }

static const struct carrier ucx_carrier = {
    .peek = ucx_peek,
    .release = ucx_release,
    .room = ucx_room,
    .commit = ucx_commit,
    .pump = ucx_progress,
    .is_ready = ucx_is_ready,
    .sleep = ucx_sleep,
    .descriptor = ucx_descriptor,
    .end = ucx_end,
};
