// Threads that help the one that computes, if they are awake in time.
#ifndef MOESAIC_POOL_H
#define MOESAIC_POOL_H

#include <stdint.h>

typedef void task_function(void *with, int64_t task, int worker);

// Does tasks 0 .. count - 1, in any order, on up to `threads` threads, the caller's among them;
// `worker` is below `threads` and no two run as the same at once. Returns when all are done.
void in_parallel(task_function *run, void *with, int64_t count, int threads);

// Lets the helpers sleep until there is work: whoever calls waits for other processes.
void pool_rest(void);

#endif
