// A machine that serves has other processes on its cores. A team of OpenMP waits for its last
// member, be it only to hear that there is nothing left to do, and so for a time slice of whatever
// runs on that member's core: milliseconds, many times a step. Here a helper that comes too late is
// not missed.
#define _GNU_SOURCE
#include "compute/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { MAX_HELPERS = 255 };
enum { LOOKS = 64 };  // between two offers to let others run
enum {
    OFFERS = 1000
};  // before a helper sleeps: about a millisecond, more than the gaps within a step

static struct {
    pthread_mutex_t owner;  // held by whoever has the pool work
    pthread_mutex_t lock;   // of those asleep
    pthread_cond_t news;
    _Atomic uint64_t round;  // odd: there is work; even: no one may begin any more
    _Atomic int64_t next;    // task
    _Atomic int inside;      // helpers that may be at work
    _Atomic int asleep;
    _Atomic int resting;  // helpers sleep at once, for the owner waits for other processes
    task_function *run;
    void *with;
    int64_t count;
    int threads, num_helpers;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .news = PTHREAD_COND_INITIALIZER};

static inline void look_again(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void work(int worker) {
    for (;;) {
        const int64_t task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (task >= pool.count) return;
        pool.run(pool.with, task, worker);
    }
}

static int is_new(uint64_t round, uint64_t seen) { return round % 2 && round != seen; }

static uint64_t next_round(uint64_t seen) {
    for (int offer = 0; offer < OFFERS && !atomic_load(&pool.resting); offer++) {
        for (int look = 0; look < LOOKS; look++) {
            const uint64_t round = atomic_load_explicit(&pool.round, memory_order_acquire);
            if (is_new(round, seen)) return round;
            look_again();
        }
        sched_yield();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.asleep, 1);
    uint64_t round;
    while (!is_new(round = atomic_load(&pool.round), seen))
        pthread_cond_wait(&pool.news, &pool.lock);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.lock);
    return round;
}

static void *help(void *argument) {
    const int worker = (int)(intptr_t)argument;
    for (uint64_t seen = 0;;) {
        seen = next_round(seen);
        // Either the owner sees this helper inside and waits, or this helper sees that the round is
        // over.
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.round) == seen && worker < pool.threads) work(worker);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return 0;
}

// A forked process has no helpers yet, and nobody at work.
static void begin_anew(void) {
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.news, 0);
    atomic_store(&pool.round, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.asleep, 0);
    pool.num_helpers = 0;
}

static void have_helpers(int wanted) {
    static int told;
    if (!told) told = !pthread_atfork(0, 0, begin_anew);
    for (; pool.num_helpers < wanted && pool.num_helpers < MAX_HELPERS; pool.num_helpers++) {
        pthread_t thread;
        void *worker = (void *)(intptr_t)(pool.num_helpers + 1);
        if (pthread_create(&thread, 0, help, worker)) return;  // then there are fewer
        pthread_setname_np(thread, "moesaic-helper");  // at most 15 characters
        pthread_detach(thread);
    }
}

void pool_rest(void) { atomic_store(&pool.resting, 1); }

void in_parallel(task_function *run, void *with, int64_t count, int threads) {
    // A caller that finds the pool at work does its own tasks: it could only take turns.
    if (threads <= 1 || count <= 1 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t task = 0; task < count; task++) run(with, task, 0);
        return;
    }
    have_helpers(threads - 1);
    pool.run = run, pool.with = with, pool.count = count, pool.threads = threads;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store(&pool.resting, 0);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.news);
        pthread_mutex_unlock(&pool.lock);
    }
    work(0);
    atomic_fetch_add(&pool.round, 1);
    for (int look = 0; atomic_load(&pool.inside); look++) {
        look_again();
        if (look % LOOKS == LOOKS - 1) sched_yield();
    }
    pthread_mutex_unlock(&pool.owner);
}
