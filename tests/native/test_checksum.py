"""The checksum of frames in C, held against the library that Python takes it from."""

import random

import pytest
import xxhash

from moesaic.native.library import lib, library


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_the_checksum_is_that_of_xxhash_at_every_length() -> None:
    data = bytearray(random.Random(0).randbytes(4096))
    lengths = [*range(1200), *range(2000, 4096, 61)]

    for length in lengths:
        seed = length * 0x9E3779B97F4A7C15 % (1 << 64) if length % 3 else 0
        start = length % 64  # wherever it lies
        part = bytes(data[start : start + length])
        expected = xxhash.xxh3_64_intdigest(part, seed=seed)
        assert lib().checksum_of(data=part, size=len(part), seed=seed) == expected, len(part)
