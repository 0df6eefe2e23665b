// Channels over a TCP connection, that of the handshake: both ends have proved the cluster secret.
//   Records  64 bytes of head with the size of the message, then the message, padded to 64 bytes. So
//            messages lie aligned where they are received.
//   Trust    the other side's sizes are checked before a byte is reserved.
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "exchange/ring.h"

enum { FEWEST = 1 << 18 };  // bytes of the buffer
enum { MOST_IDLE = 1 << 22 };  // bytes of the buffer that are kept while nothing is in it

struct outbound {  // a record that is written, or not sent yet
    struct outbound *next;
    int64_t size, sent;
    _Alignas(64) uint8_t bytes[];
};

struct stream {
    int socket;
    int epoll;        // tells of the socket: when it can be written to as well, while a record waits
    int asks_for_room;
    int ended;        // the other side has closed it, or it broke
    uint8_t *buffer;  // what has come
    int64_t capacity, begin, end;
    struct outbound *first, *last, *room;
};

static int64_t record_bytes(int64_t size) {
    return RECORD + (size + RECORD - 1) / RECORD * RECORD;
}

// Bytes of the message whose record comes next; 0 if its head is not here yet.
static int64_t next_size(const struct stream *s) {
    int64_t size = 0;
    if (s->end - s->begin >= RECORD) memcpy(&size, s->buffer + s->begin, sizeof size);
    return size;
}

static int is_sound(const struct channel *c, int64_t size) { return size > 0 && size <= c->most; }

static int is_whole(const struct channel *c) {
    const struct stream *s = c->stream;
    const int64_t size = next_size(s);
    return is_sound(c, size) && s->end - s->begin >= record_bytes(size);
}

// Has `bytes` of room from `begin` on; false if there is no memory.
static int make_room(struct stream *s, int64_t bytes) {
    if (s->begin == s->end) s->begin = s->end = 0;
    if (s->begin + bytes <= s->capacity) return 1;
    uint8_t *to = s->buffer;
    int64_t capacity = s->capacity;
    if (bytes > capacity) {
        capacity = bytes > FEWEST ? bytes : FEWEST;
        if (!(to = aligned_alloc(RECORD, (size_t)capacity))) return 0;
    }
    if (s->end > s->begin) memmove(to, s->buffer + s->begin, (size_t)(s->end - s->begin));
    if (to != s->buffer) free(s->buffer);
    s->buffer = to, s->capacity = capacity;
    s->end -= s->begin, s->begin = 0;
    return 1;
}

// Room for the rest of the next record; false if there is none, or no sense in its head.
static int may_fill(struct channel *c) {
    struct stream *s = c->stream;
    if (s->end - s->begin < RECORD) return make_room(s, RECORD);
    const int64_t size = next_size(s);
    if (size > c->most) c->excess = size;
    return is_sound(c, size) && make_room(s, record_bytes(size));
}

// Reads what has come, as long as no message is whole: the rest may wait in the kernel.
static int fill(struct channel *c) {
    struct stream *s = c->stream;
    int moved = 0;
    while (!is_whole(c)) {
        if (s->ended || !may_fill(c)) {
            c->broken = 1;
            break;
        }
        const ssize_t got =
            recv(s->socket, s->buffer + s->end, (size_t)(s->capacity - s->end), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            s->ended = 1;
        else
            s->end += got, moved = 1;
    }
    return moved;
}

static void ask_for_room(struct stream *s, int asks) {
    if (s->asks_for_room == asks) return;
    struct epoll_event event = {.events = EPOLLIN | (asks ? (uint32_t)EPOLLOUT : 0)};
    epoll_ctl(s->epoll, EPOLL_CTL_MOD, s->socket, &event);
    s->asks_for_room = asks;
}

static int flush(struct channel *c) {
    struct stream *s = c->stream;
    int moved = 0;
    while (s->first && !c->broken && !s->ended) {
        struct outbound *out = s->first;
        const ssize_t sent = send(s->socket, out->bytes + out->sent, (size_t)(out->size - out->sent),
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (sent < 0) {
            s->ended = 1;
            break;
        }
        moved = 1, out->sent += sent;
        if (out->sent < out->size) continue;
        s->first = out->next;
        if (!s->first) s->last = 0;
        free(out);
    }
    if (!c->broken) ask_for_room(s, s->first != 0 && !s->ended);
    return moved;
}

static int stream_pump(struct channel *c) {
    if (c->broken) return 0;  // the socket may be another's by now
    const int sent = c->stream->first ? flush(c) : 0;
    return fill(c) | sent;
}

static const uint8_t *stream_peek(struct channel *c, int64_t *size) {
    const struct stream *s = c->stream;
    if (!is_whole(c)) return 0;
    *size = next_size(s);
    return s->buffer + s->begin + RECORD;
}

static void stream_release(struct channel *c) {
    struct stream *s = c->stream;
    s->begin += record_bytes(next_size(s));
    if (s->begin < s->end) return;
    s->begin = s->end = 0;
    if (s->capacity <= MOST_IDLE) return;
    free(s->buffer);
    s->buffer = 0, s->capacity = 0;
}

static uint8_t *stream_room(struct channel *c, int64_t size) {
    const int64_t bytes = record_bytes(size);
    struct outbound *out = aligned_alloc(RECORD, sizeof *out + (size_t)bytes);
    if (!out) return 0;
    *out = (struct outbound){.size = bytes};
    // The padding goes out as well, and must not tell what this memory held before.
    memset(out->bytes + bytes - RECORD, 0, RECORD);
    memset(out->bytes, 0, RECORD);
    memcpy(out->bytes, &size, sizeof size);
    free(c->stream->room);
    c->stream->room = out;
    return out->bytes + RECORD;
}

static void stream_commit(struct channel *c, int64_t size) {
    (void)size;
    struct stream *s = c->stream;
    struct outbound *out = s->room;
    s->room = 0;
    if (s->last)
        s->last->next = out;
    else
        s->first = out;
    s->last = out;
    if (s->first == out) flush(c);
}

// What is not read yet, `epoll` tells of.
static int stream_is_ready(const struct channel *c) { return c->broken || is_whole(c); }

static int stream_sleep(struct channel *c) { return !stream_is_ready(c); }

static int stream_descriptor(const struct channel *c) { return c->stream->epoll; }

static void stream_end(struct channel *c) {
    struct stream *s = c->stream;
    for (struct outbound *out = s->first, *next; out; out = next) next = out->next, free(out);
    free(s->room);
    free(s->buffer);
    close(s->epoll);
    free(s);
}

static const struct carrier stream_carrier = {
    .peek = stream_peek,
    .release = stream_release,
    .room = stream_room,
    .commit = stream_commit,
    .pump = stream_pump,
    .is_ready = stream_is_ready,
    .sleep = stream_sleep,
    .descriptor = stream_descriptor,
    .end = stream_end,
};

EXPORT void *channel_open_stream(int socket, int64_t most) {
    struct channel *c = calloc(1, sizeof *c);
    struct stream *s = calloc(1, sizeof *s);
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    if (!c || !s || epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event)) {
        if (epoll >= 0) close(epoll);
        free(c), free(s);
        return 0;
    }
    *s = (struct stream){.socket = socket, .epoll = epoll};
    c->carrier = &stream_carrier, c->stream = s;
    c->control = -1, c->bell = -1, c->most = most;
    return c;
}

EXPORT int channel_descriptor(const void *channel) {
    const struct channel *c = channel;
    return c->carrier ? c->carrier->descriptor(c) : -1;
}
