// XXH3, 64 bits, with a seed: the checksum of frames and the digest of decisions.
#ifndef MOESAIC_XXH3_H
#define MOESAIC_XXH3_H

#include <stdint.h>

uint64_t xxh3_64(const void *data, int64_t size, uint64_t seed);

#endif
