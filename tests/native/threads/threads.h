// The same channels with a thread on each side, for a sanitizer that finds races. A wake-up that is lost
// would leave a side asleep for ever: after LONGEST_S of it the run fails.
#ifndef MOESAIC_THREADS_H
#define MOESAIC_THREADS_H

#include "fuzz.h"

enum { LONGEST_S = 30 };

// So many messages each way, of all sizes.
void pass_messages(uint64_t seed, uint64_t count);

// So many batches, each to two workers that answer without Python.
void ask_workers(uint64_t seed, uint64_t count);

// So many calls of each of two threads that share their tasks with the pool.
void share_tasks(uint64_t seed, uint64_t count);

#endif
