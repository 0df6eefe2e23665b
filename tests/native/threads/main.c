// threads SEED MESSAGES BATCHES CALLS: passes messages both ways, asks workers for batches, shares tasks.
#include <stdio.h>
#include <stdlib.h>

#include "threads.h"

const char *__tsan_default_options(void);

const char *__tsan_default_options(void) { return "halt_on_error=1:second_deadlock_stack=1"; }

static uint64_t seed;

static void say(void) { fprintf(stderr, "1 failed: seed %llu\n", (unsigned long long)seed); }

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: threads SEED MESSAGES BATCHES CALLS\n");
        return 2;
    }
    const uint64_t messages = strtoull(argv[2], 0, 0), batches = strtoull(argv[3], 0, 0);
    const uint64_t calls = strtoull(argv[4], 0, 0);
    seed = strtoull(argv[1], 0, 0), say_seed = say;
    pass_messages(seed, messages);
    ask_workers(seed, batches);
    share_tasks(seed, calls);
    printf("messages %llu both ways, batches %llu, calls %llu: passed, 0 failed\n",
           (unsigned long long)messages, (unsigned long long)batches, (unsigned long long)calls);
    return 0;
}
