// After the specification of XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), whose names of
// constants these are. Little-endian machines only, as frames are.
#include "exchange/xxh3.h"

#include <string.h>

#include "calls.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");

enum { STRIPE = 64, STEP = 8, SECRET = 192, STRIPES = (SECRET - STRIPE) / STEP };

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u
#define MX_1 0x165667919E3779F9u
#define MX_2 0x9FB21C651E98DF25u

static const uint8_t SECRET_BYTES[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t lanes __attribute__((vector_size(STRIPE)));

static inline uint64_t read32(const uint8_t *from) {
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline uint64_t read64(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline lanes read_lanes(const uint8_t *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= MX_1;
    return h ^ h >> 32;
}

static uint64_t old_avalanche(uint64_t h) {
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static inline uint64_t mix(const uint8_t *in, const uint8_t *secret, uint64_t seed) {
    return folded(read64(in) ^ (read64(secret) + seed),
                  read64(in + 8) ^ (read64(secret + 8) - seed));
}

static uint64_t up_to_16(const uint8_t *in, uint64_t size, uint64_t seed) {
    const uint8_t *secret = SECRET_BYTES;
    if (size > 8) {
        const uint64_t low = read64(in) ^ ((read64(secret + 24) ^ read64(secret + 32)) + seed);
        const uint64_t high =
            read64(in + size - 8) ^ ((read64(secret + 40) ^ read64(secret + 48)) - seed);
        return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t h = read32(in + size - 4) + (read32(in) << 32);
        h ^= (read64(secret + 8) ^ read64(secret + 16)) - seed;
        h ^= rotated(h, 49) ^ rotated(h, 24);
        h *= MX_2;
        h ^= (h >> 35) + size;
        h *= MX_2;
        return h ^ h >> 28;
    }
    if (!size) return old_avalanche(seed ^ read64(secret + 56) ^ read64(secret + 64));
    const uint64_t both = (uint64_t)in[0] << 16 | (uint64_t)in[size >> 1] << 24 | in[size - 1] |
                          size << 8;
    return old_avalanche(both ^ ((read32(secret) ^ read32(secret + 4)) + seed));
}

static uint64_t up_to_240(const uint8_t *in, uint64_t size, uint64_t seed) {
    const uint8_t *secret = SECRET_BYTES;
    uint64_t sum = size * P64_1;
    if (size <= 128) {
        for (int64_t i = (int64_t)(size - 1) / 32; i >= 0; i--)
            sum += mix(in + 16 * i, secret + 32 * i, seed) +
                   mix(in + size - 16 * (i + 1), secret + 32 * i + 16, seed);
        return avalanche(sum);
    }
    for (uint64_t i = 0; i < 8; i++) sum += mix(in + 16 * i, secret + 16 * i, seed);
    sum = avalanche(sum);
    for (uint64_t i = 8; i < size / 16; i++)
        sum += mix(in + 16 * i, secret + 16 * (i - 8) + 3, seed);
    return avalanche(sum + mix(in + size - 16, secret + 136 - 17, seed));
}

static inline lanes accumulated(lanes sums, const uint8_t *in, const uint8_t *secret) {
    const lanes value = read_lanes(in), key = value ^ read_lanes(secret);
    const lanes crossed = __builtin_shuffle(value, (lanes){1, 0, 3, 2, 5, 4, 7, 6});
    return sums + crossed + (key & 0xffffffff) * (key >> 32);
}

static uint64_t longer(const uint8_t *in, uint64_t size, uint64_t seed) {
    uint8_t secret[SECRET];
    for (int i = 0; i < SECRET; i += 16) {
        const uint64_t low = read64(SECRET_BYTES + i) + seed;
        const uint64_t high = read64(SECRET_BYTES + i + 8) - seed;
        memcpy(secret + i, &low, 8);
        memcpy(secret + i + 8, &high, 8);
    }
    lanes sums = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const uint8_t *last = in + size - STRIPE;
    const lanes scrambling = read_lanes(secret + SECRET - STRIPE);
    for (uint64_t blocks = (size - 1) / (STRIPES * STRIPE); blocks; blocks--) {
        for (int n = 0; n < STRIPES; n++, in += STRIPE)
            sums = accumulated(sums, in, secret + n * STEP);
        sums = (sums ^ sums >> 47 ^ scrambling) * P32_1;
    }
    for (int n = 0; in < last; n++, in += STRIPE) sums = accumulated(sums, in, secret + n * STEP);
    sums = accumulated(sums, last, secret + SECRET - STRIPE - 7);
    uint64_t total = size * P64_1;
    for (int i = 0; i < 4; i++)
        total += folded(sums[2 * i] ^ read64(secret + 11 + 16 * i),
                        sums[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return avalanche(total);
}

uint64_t xxh3_64(const void *data, int64_t size, uint64_t seed) {
    if (size <= 16) return up_to_16(data, (uint64_t)size, seed);
    if (size <= 240) return up_to_240(data, (uint64_t)size, seed);
    return longer(data, (uint64_t)size, seed);
}

EXPORT uint64_t checksum_of(const uint8_t *data, int64_t size, uint64_t seed) {
    return xxh3_64(data, size, seed);
}
