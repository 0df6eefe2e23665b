// Two sides of one channel in one process.
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "fuzz.h"

void open_pair(struct pair *pair, int64_t capacity, int64_t most) {
    const int64_t bytes = channel_bytes(capacity);
    *pair = (struct pair){.memory = exact(bytes), .capacity = capacity};
    memset(pair->memory, 0, (size_t)bytes);
    for (int side = 0; side < 2; side++) {
        pair->bells[side] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        pair->controls[side] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        CHECK(pair->bells[side] >= 0 && pair->controls[side] >= 0);
    }
    for (int side = 0; side < 2; side++) {
        pair->sides[side] = channel_open(pair->memory, capacity, side, pair->bells[!side],
                                         pair->controls[side], most);
        CHECK(pair->sides[side]);
    }
}

void close_pair(struct pair *pair) {
    for (int side = 0; side < 2; side++) {
        channel_close(pair->sides[side]);
        close(pair->bells[side]), close(pair->controls[side]);
    }
    free(pair->memory);
}

int64_t any_capacity(void) { return 256 * (one_in(4) ? between(2, 200) : between(2, 16)); }

int is_rung(int bell) {
    uint64_t rung;
    return read(bell, &rung, sizeof rung) == sizeof rung;
}
