// The sleep of an event loop whose process has channels: what can be answered here is, and Python
// wakes up for the rest.
#define _GNU_SOURCE
#include <sys/epoll.h>

#include "exchange/answer.h"

// Between two looks at other descriptors, while requests come one after the other.
enum { LOOK_EVERY_NS = 100 * 1000 };
enum { MOST_EVENTS = 8 };

enum { NOTHING, MESSAGES, EVENTS };

// Answers one message of each channel, so that all have their turns. Sets `rare` if one is Python's.
static int serve(void *const *channels, int64_t count, int *rare) {
    int moved = 0;
    for (int64_t i = 0; i < count; i++) {
        struct channel *c = channels[i];
        moved |= channel_pump(c);
        int64_t size;
        const uint8_t *message;
        if ((message = channel_peek(c, &size))) {
            const int done = c->answers && answer(c->answers, c, message, size);
            if (done) channel_release(c);
            *rare |= !done, moved |= done;
        }
        if (c->broken || (c->kept && !c->outstanding)) *rare = 1;
    }
    return moved;
}

// True if one of the events is Python's: neither the bell nor a channel's, which was looked at.
static int are_others(const struct epoll_event *events, int came, void *const *channels,
                      int64_t count, int bell) {
    for (int i = 0; i < came; i++) {
        const int fd = events[i].data.fd;
        int known = fd == bell;
        if (known) quiet(bell);
        for (int64_t n = 0; n < count && !known; n++) known = channel_descriptor(channels[n]) == fd;
        if (!known) return 1;
    }
    return 0;
}

// Sleeps until something happens; false if it was only the bell.
static int sleep_on(void *const *channels, int64_t count, int epoll, int bell,
                    int64_t timeout_ns) {
    int idle = 1;
    for (int64_t i = 0; i < count; i++) idle &= channel_sleep(channels[i]);
    if (!idle) return 0;
    struct epoll_event events[MOST_EVENTS];
    const int64_t ms = timeout_ns < 0 ? -1 : (timeout_ns + 999999) / 1000000;
    const int came = epoll_wait(epoll, events, MOST_EVENTS, ms > 1 << 30 ? 1 << 30 : (int)ms);
    return came <= 0 || are_others(events, came, channels, count, bell);
}

EXPORT int wait_for_events(void *const *channels, int64_t count, int epoll, int bell,
                           int64_t timeout_ns) {
    const int64_t began = now_ns();
    int64_t looked = began;
    struct epoll_event events[MOST_EVENTS];
    for (;;) {
        int rare = 0;
        channel_turn();
        const int moved = serve(channels, count, &rare);
        if (rare) return MESSAGES;
        const int64_t now = now_ns();
        if (timeout_ns >= 0 && now - began >= timeout_ns) return NOTHING;
        if (!moved) {
            const int64_t left = timeout_ns < 0 ? -1 : timeout_ns - (now - began);
            if (sleep_on(channels, count, epoll, bell, left)) return EVENTS;
        } else if (now - looked >= LOOK_EVERY_NS) {
            looked = now;
            const int came = epoll_wait(epoll, events, MOST_EVENTS, 0);
            if (are_others(events, came, channels, count, bell)) return EVENTS;
        }
    }
}
