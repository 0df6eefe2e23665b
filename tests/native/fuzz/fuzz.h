// A seeded driver for all that comes from other processes: frames, rings, connections, requests,
// replies. Compiled with sanitizers, it finds reads and writes out of bounds; results it compares with
// plain ones.
//   Round    one seed, one kind of test: both are printed where a round fails, and bring it back.
//   Plainly  the same once more, as slow and simple as can be.
#ifndef MOESAIC_FUZZ_H
#define MOESAIC_FUZZ_H

#include "exchange/frame.h"
#include "exchange/ring.h"

#define CHECK(truth) ((truth) ? (void)0 : fail(__FILE__, __LINE__, #truth))

// The kinds of rounds.
void fuzz_frames(void);
void fuzz_rings(void);
void fuzz_streams(void);
void fuzz_damage(void);
void fuzz_refusals(void);
void fuzz_answers(void);
void fuzz_asks(void);

// Prints a statement that is false and ends the process; `say_seed`, if any, says how to repeat it.
_Noreturn void fail(const char *file, int line, const char *truth);
extern void (*say_seed)(void);

// Numbers of this thread, the same ones after the same seed.
void begin_with(uint64_t seed);
uint64_t any(void);
int64_t below(int64_t bound);               // 0..bound - 1
int64_t between(int64_t low, int64_t high);  // both included
int one_in(int64_t times);
uint64_t edge(void);  // near a power of two or zero: where checks of bounds go wrong
float any_float(void);

// Memory of exactly so many bytes, at a multiple of 64: the sanitizer sees the first one beyond.
void *exact(int64_t bytes);
void *exact_copy(const void *from, int64_t bytes);
void scramble(void *to, int64_t bytes);
float *any_floats(int64_t count);

// A message of the driver's own, to be freed.
struct message {
    uint8_t *bytes;
    int64_t size;
};

struct message copy_of(const uint8_t *bytes, int64_t size);
int same(struct message a, const uint8_t *bytes, int64_t size);

// A valid frame with a payload of chance; `head` says kind, fields, tensors and size of the body.
struct message frame_of(struct frame_head *head);

// A head of chance, with up to four small tensors and a body.
struct frame_head any_head(void);

// Damages a message somewhere; most of the time its length and checksum are right again.
void damage(struct message *m);
void reseal(struct message *m);

// Reads a frame plainly; true if moesaic.transport.frame would take it. One with parcels is Python's alone.
int read_plainly(const uint8_t *message, int64_t size, const struct frame_limits *limits,
                 struct frame_head *head);

// Both sides of a channel over rings. `bells` and `controls` are each side's own.
struct pair {
    uint8_t *memory;
    int64_t capacity;
    struct channel *sides[2];
    int bells[2], controls[2];
};

void open_pair(struct pair *pair, int64_t capacity, int64_t most);
void close_pair(struct pair *pair);
int64_t any_capacity(void);
int is_rung(int bell);  // and quiets it

// A clock that only goes on when it is looked at, or slept by. `meanwhile` happens whenever the
// waiting side sleeps; false: nothing can happen any more. `overslept`: called after a sleep that
// nobody ended.
extern int64_t clock_ns;
extern int (*meanwhile)(void);
extern void (*overslept)(void);

#endif
