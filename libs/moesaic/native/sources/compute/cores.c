#define _GNU_SOURCE
#include "compute/cores.h"

#include <sched.h>

void stay_on(int core) {
    static _Thread_local int told = ANY_CORE, stays;
    static _Thread_local cpu_set_t before;
    if (core == told) return;
    told = core;
    if (!stays && sched_getaffinity(0, sizeof before, &before)) return;
    cpu_set_t only;
    CPU_ZERO(&only);
    if (core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &before)) CPU_SET(core, &only);
    const int found = CPU_COUNT(&only);
    if (!found && !stays) return;
    if (!sched_setaffinity(0, sizeof only, found ? &only : &before)) stays = found;
}
