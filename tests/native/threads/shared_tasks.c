// Tasks of two callers at once, among the helpers of the pool: each is done once, and before its caller
// goes on.
#include <pthread.h>
#include <string.h>

#include "compute/pool.h"
#include "threads.h"

enum { MOST_TASKS = 40, THREADS = 4 };

static uint64_t calls;

static void count_task(void *with, int64_t task, int worker) {
    int *done = with;
    CHECK(worker >= 0 && worker < THREADS);
    done[task]++;
}

static void *call_often(void *seed) {
    begin_with(*(uint64_t *)seed);
    for (uint64_t n = 0; n < calls; n++) {
        int done[MOST_TASKS] = {0};
        const int64_t count = below(MOST_TASKS + 1);
        if (one_in(20)) pool_rest();
        in_parallel(count_task, done, count, (int)between(1, THREADS));
        for (int64_t task = 0; task < MOST_TASKS; task++) CHECK(done[task] == (task < count));
    }
    return 0;
}

void share_tasks(uint64_t seed, uint64_t count) {
    uint64_t other_seed = ~seed;
    pthread_t other;
    calls = count;
    CHECK(!pthread_create(&other, 0, call_often, &other_seed));
    call_often(&seed);
    pthread_join(other, 0);
}
