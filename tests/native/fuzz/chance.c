// Numbers and memory of chance.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"

static _Thread_local uint64_t state;

void (*say_seed)(void);

_Noreturn void fail(const char *file, int line, const char *truth) {
    fprintf(stderr, "%s:%d: false: %s\n", file, line, truth);
    if (say_seed) say_seed();
    _exit(1);
}

void begin_with(uint64_t seed) { state = seed; }

uint64_t any(void) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t below(int64_t bound) { return (int64_t)(any() % (uint64_t)bound); }

int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

int one_in(int64_t times) { return !below(times); }

uint64_t edge(void) {
    const uint64_t power = one_in(8) ? 0 : 1ull << below(64);
    return (one_in(4) ? -power : power) + (uint64_t)between(-2, 2);
}

float any_float(void) {
    static const float rare[] = {0.0f, -0.0f, 1e-40f, -1e38f, 3e38f, __builtin_inff()};
    const float common = (float)between(-(1 << 20), 1 << 20) / (1 << 19);
    if (!one_in(200)) return common;
    return one_in(4) ? __builtin_nanf("") : rare[below(6)];
}

void *exact(int64_t bytes) {
    void *memory;
    CHECK(!posix_memalign(&memory, 64, bytes ? (size_t)bytes : 1));
    return memory;
}

void *exact_copy(const void *from, int64_t bytes) {
    void *copy = exact(bytes);
    if (bytes) memcpy(copy, from, (size_t)bytes);
    return copy;
}

void scramble(void *to, int64_t bytes) {
    uint8_t *at = to;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        const uint64_t value = any();
        memcpy(at, &value, 8);
    }
    while (bytes--) *at++ = (uint8_t)any();
}

float *any_floats(int64_t count) {
    float *numbers = exact(count * 4);
    for (int64_t i = 0; i < count; i++) numbers[i] = any_float();
    return numbers;
}
