// The time in which a round plays: it goes on when somebody looks at it, and sleeps take none. And the
// cores on which peers fell asleep: each look may find another one.
#define _GNU_SOURCE
#include <poll.h>
#include <sys/epoll.h>

#include "fuzz.h"

int64_t clock_ns;
int (*meanwhile)(void);
void (*overslept)(void);

// The linker puts these in the places of the functions that they are named after.
int64_t __wrap_now_ns(void);
uint32_t __wrap_channel_core(const struct channel *c);
int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout,
                 const sigset_t *mask);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms);
int __real_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms);

int64_t __wrap_now_ns(void) { return clock_ns += 100; }

uint32_t __wrap_channel_core(const struct channel *c) {
    return one_in(2) ? this_core() : c->broken + (uint32_t)below(4);
}

// Sleeps until a look finds something, or nothing happens any more and the time is over.
static int sleep_for(int64_t ns, int (*look)(void *with), void *with) {
    for (int going_on = 1; going_on;) {
        going_on = meanwhile && meanwhile();
        clock_ns += 1000;
        const int ready = look(with);
        if (ready) return ready;
    }
    clock_ns += ns;
    if (overslept) overslept();
    return 0;
}

struct descriptors {
    struct pollfd *fds;
    nfds_t count;
    struct epoll_event *events;
    int epoll, most;
};

static int look_by_poll(void *with) {
    const struct descriptors *d = with;
    return poll(d->fds, d->count, 0);
}

static int look_by_epoll(void *with) {
    const struct descriptors *d = with;
    return __real_epoll_wait(d->epoll, d->events, d->most, 0);
}

int __wrap_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout,
                 const sigset_t *mask) {
    struct descriptors d = {.fds = fds, .count = count};
    (void)mask;
    return sleep_for(timeout->tv_sec * 1000000000 + timeout->tv_nsec, look_by_poll, &d);
}

int __wrap_epoll_wait(int epoll, struct epoll_event *events, int most, int timeout_ms) {
    struct descriptors d = {.epoll = epoll, .events = events, .most = most};
    return timeout_ms ? sleep_for(timeout_ms * 1000000ll, look_by_epoll, &d) : look_by_epoll(&d);
}
