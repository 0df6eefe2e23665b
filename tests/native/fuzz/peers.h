// Expert workers that follow a script, and exchanges with them.
#ifndef MOESAIC_FUZZ_PEERS_H
#define MOESAIC_FUZZ_PEERS_H

#include "fuzz.h"

enum { MOST_PEERS = 3, MOST_EXCHANGES = 2, MOST_MESSAGES = 64 };

// Messages in their order.
struct list {
    struct message all[MOST_MESSAGES];
    int num;
};

void append(struct list *list, struct message m);
struct message take_at(struct list *list, int at);
int find(const struct list *list, const uint8_t *bytes, int64_t size);  // -1: it is not there

struct peer {
    struct pair pair;        // the asking side is 0
    struct list requests;    // that are on their way to it
    struct list script;      // to be sent; a message without bytes: it dies, or does damage
    struct list sent;        // and not seen by anybody yet
    int gone;
    int64_t gone_ns;
};

// One exchange, with the memory that its two structs point to.
struct exchange {
    struct ask ask;
    struct asked asked;
    int peers[MOST_PEERS];  // by call
    void *owned[16];
    int num_owned, under_way;
};

extern struct peer peers[MOST_PEERS];
extern int num_peers, bell;

// One that has dialled the asking side: it asks whether that is there, and says other things, too.
extern struct pair caller;
void check_caller(void);  // nothing of that was lost

void open_peers(void);
void close_peers(void);

// Lets one of them go on with its script; false: nothing happens any more.
int let_peers_act(void);

// An exchange of chance that is not sent yet, and the scripts of its peers.
void make_exchange(struct exchange *x, uint64_t seq);
void free_exchange(struct exchange *x);

struct frame_limits limits_of(const struct exchange *x);

// A message may decide a call: it answers it, rightly or not, or is no frame at all.
enum decision { NOTHING_YET, RIGHT, WRONG, NO_FRAME };
enum decision decides(const struct exchange *x, int call, struct message m,
                      struct frame_head *head);

#endif
