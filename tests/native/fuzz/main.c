// fuzz SEED ROUNDS [KIND]: plays rounds of every kind, or of one, from a seed on. A round that fails ends
// the run, and says how it is played alone.
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"

enum { LONGEST_S = 60 };       // of a round: milliseconds, where nothing hangs
enum { LEAKS_EVERY = 50 };     // rounds

const char *__asan_default_options(void);
const char *__ubsan_default_options(void);

const char *__asan_default_options(void) {
    // It has no more memory than a machine would have.
    return "allocator_may_return_null=1:max_allocation_size_mb=64:detect_stack_use_after_return=1";
}

// It knows nothing of the callback of the other sanitizer, but a signal is heard.
const char *__ubsan_default_options(void) { return "print_stacktrace=1:abort_on_error=1"; }

static const struct kind {
    const char *name;
    void (*round)(void);
} KINDS[] = {
    {"frames", fuzz_frames},
    {"rings", fuzz_rings},
    {"streams", fuzz_streams},
    {"damage", fuzz_damage},
    {"refusals", fuzz_refusals},
    {"answers", fuzz_answers},
    {"asks", fuzz_asks},
};
enum { NUM_KINDS = sizeof KINDS / sizeof *KINDS };

static const struct kind *playing;
static uint64_t playing_seed;

static void say(void) {
    if (playing)
        fprintf(stderr, "1 failed: fuzz %llu 1 %s\n", (unsigned long long)playing_seed,
                playing->name);
}

static void say_and_go(int signal) {
    if (signal == SIGALRM) fprintf(stderr, "it hangs\n");
    say();
    _exit(1);
}

static void check_leaks(uint64_t seed) {
    if (!__lsan_do_recoverable_leak_check()) return;
    fprintf(stderr, "1 failed: one of the last rounds to %llu\n", (unsigned long long)seed);
    _exit(1);
}

static void play(const struct kind *kind, uint64_t seed) {
    playing = kind, playing_seed = seed;
    begin_with(seed * NUM_KINDS + (uint64_t)(kind - KINDS));
    clock_ns += 10 * 1000000000ll, meanwhile = 0, overslept = 0;
    alarm(LONGEST_S);
    kind->round();
    alarm(0);
    playing = 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: fuzz SEED ROUNDS [KIND]\n");
        return 2;
    }
    const uint64_t first = strtoull(argv[1], 0, 0), rounds = strtoull(argv[2], 0, 0);
    long long passed[NUM_KINDS] = {0}, all = 0;
    __sanitizer_set_death_callback(say);
    say_seed = say;
    signal(SIGALRM, say_and_go), signal(SIGABRT, say_and_go);
    for (uint64_t round = 0; round < rounds; round++) {
        for (int k = 0; k < NUM_KINDS; k++) {
            if (argc > 3 && strcmp(argv[3], KINDS[k].name)) continue;
            play(&KINDS[k], first + round);
            passed[k]++, all++;
        }
        if (round % LEAKS_EVERY == LEAKS_EVERY - 1) check_leaks(first + round);
    }
    for (int k = 0; k < NUM_KINDS; k++) printf("%s %lld, ", KINDS[k].name, passed[k]);
    printf("%lld passed, 0 failed\n", all);
    return 0;
}
