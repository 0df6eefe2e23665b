// The core on which a thread runs. The system moves threads to cores that are free, but not at once: where
// several processes take turns on a few cores, one of them waits while a core is idle.
#ifndef MOESAIC_CORES_H
#define MOESAIC_CORES_H

enum { ANY_CORE = -1 };

// Keeps this thread on `core`, if it may run there, until it is told another one; ANY_CORE: on every core
// on which it might run before.
void stay_on(int core);

#endif
