// Connections: whatever a peer sends, in whatever pieces, a message arrives whole and in order, or the
// channel ends at the first number without sense. What a peer does not read waits.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"

enum { HEAD = 64, MOST = 1 << 16, MOST_SENT = 32 };

static struct channel *own;
static int peer;
static struct message sent[MOST_SENT];
static int first, last;

static struct message any_message(void) {
    struct message m = {0, one_in(4) ? between(1, MOST) : between(1, 400)};
    m.bytes = exact(m.size);
    scramble(m.bytes, m.size);
    return m;
}

// Takes what is whole; false once the channel is broken.
static int take_all(void) {
    uint8_t *message;
    int64_t size;
    while ((size = channel_take(own, &message)) > 0) {
        CHECK(first < last && (uintptr_t)message % 64 == 0);
        CHECK(same(sent[first], message, size));
        free(sent[first++].bytes);
        channel_taken(own);
    }
    return !size;
}

static void write_all(const uint8_t *bytes, int64_t size) {
    while (size) {
        const int64_t piece = between(1, size < 3000 ? size : 3000);
        CHECK(write(peer, bytes, (size_t)piece) == piece);
        bytes += piece, size -= piece;
        if (one_in(3)) CHECK(take_all());
    }
}

static void write_record(int64_t size, const uint8_t *bytes) {
    const int64_t padded = size > 0 && size <= MOST ? (size + 63) / 64 * 64 : 64;
    uint8_t *record = exact(HEAD + padded);
    scramble(record, HEAD + padded);
    memcpy(record, &size, sizeof size);
    if (bytes) memcpy(record + HEAD, bytes, (size_t)size);
    write_all(record, bytes ? HEAD + padded : HEAD);
    free(record);
}

static void hear(void) {
    for (int64_t n = between(0, 6); n; n--) {
        sent[last++] = any_message();
        write_record(sent[last - 1].size, sent[last - 1].bytes);
    }
    CHECK(take_all() && first == last);
}

static void refuse(void) {
    uint8_t *message;
    int64_t size = one_in(2) ? -between(0, INT64_MAX - 1) : MOST + between(1, INT64_MAX - MOST - 1);
    if (one_in(4)) {  // the end, in the middle of a record
        size = 0;
        const uint8_t some[HEAD + 10] = {100};
        CHECK(write(peer, some, (size_t)between(0, sizeof some)) >= 0);
        close(peer), peer = -1;
    } else {
        uint8_t record[HEAD] = {0};
        memcpy(record, &size, sizeof size);
        CHECK(write(peer, record, sizeof record) == sizeof record);
    }
    CHECK(channel_take(own, &message) == -1);
    CHECK(channel_excess(own) == (size > MOST ? size : 0));
    CHECK(channel_send(own, sent->bytes, 1) == -1 && !channel_sleep(own));
}

// Messages to a peer that reads now and then.
static void speak(void) {
    uint8_t *received = 0, *wanted = 0;
    int64_t got = 0, want = 0;
    for (int64_t n = between(1, 20); n; n--) {
        struct message m = any_message();
        const int64_t padded = HEAD + (m.size + 63) / 64 * 64;
        CHECK(!channel_send(own, m.bytes, m.size));
        wanted = realloc(wanted, (size_t)(want + padded));
        memset(wanted + want, 0, (size_t)padded);
        memcpy(wanted + want, &m.size, sizeof m.size);
        memcpy(wanted + want + HEAD, m.bytes, (size_t)m.size);
        want += padded;
        free(m.bytes);
    }
    received = malloc((size_t)want);
    while (got < want) {
        const ssize_t came = recv(peer, received + got, (size_t)between(1, want - got), MSG_DONTWAIT);
        if (came > 0) got += came;
        CHECK(take_all());
    }
    CHECK(!memcmp(received, wanted, (size_t)want));
    free(received), free(wanted);
}

void fuzz_streams(void) {
    int ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends));
    own = channel_open_stream(ends[0], MOST), peer = ends[1];
    CHECK(own);
    first = last = 0;
    for (int64_t n = between(1, 4); n; n--) {
        if (one_in(2))
            speak();
        else
            hear();
        first = last = 0;
    }
    if (one_in(2)) refuse();
    channel_close(own);
    close(ends[0]);
    if (peer >= 0) close(peer);
}
