"""Random weights of 4 bits, and how checkpoints (compressed-tensors) and GGUF files (Q4_0, Q6_K) spell them.

Both have groups of 32 inputs with one float16 scale each, and codes 0..15 of which 8 means zero. So the same codes
and scales are the same numbers in both, and nothing is rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32
STEP = 1 / 256  # of scales: products with whole numbers below 16 are exact in bfloat16
_POOL_BYTES = 1 << 26
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Matrix:
    """Codes of one matrix, two a byte, the lower half first, and its scales, in 256ths of a 16th."""

    num_out: int
    num_in: int
    codes: Bytes  # [out, in / 2]
    sixteenths: NDArray[np.int8]  # [out, in / 32]

    @property
    def scales(self) -> NDArray[np.float16]:
        """float16 ``[out, in / 32]``."""
        return (self.sixteenths * np.float32(STEP / 16)).astype(np.float16)

    def halves(self) -> tuple[Bytes, Bytes]:
        """Codes of even and of odd inputs, ``[out, in / 2]`` each."""
        return np.bitwise_and(self.codes, 15), np.right_shift(self.codes, 4)

    def signed(self) -> NDArray[np.int8]:
        """Codes as whole numbers around zero, ``[out, in]``."""
        return np.stack(self.halves(), axis=-1).reshape(self.num_out, -1).astype(np.int8) - 8

    def values(self) -> NDArray[np.float32]:
        """The numbers, ``[out, in]``."""
        scales = np.repeat(self.scales.astype(np.float32), GROUP, axis=1)
        return self.signed().astype(np.float32) * scales

    def bfloat16(self) -> bytes:
        """The numbers as bfloat16, exact."""
        bits = self.values().view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return (bits >> 16).astype(np.uint16).tobytes()

    def q4_0(self) -> bytes:
        """Blocks of GGUF: a scale, then bytes with inputs i and i + 16."""
        # Of a group: the first 16 inputs, and the others.
        pairs = self.codes.reshape(-1, 2, 8)
        first, second = pairs[:, 0], pairs[:, 1]
        blocks = np.empty((len(pairs), 18), np.uint8)
        blocks[:, :2] = self.scales.reshape(-1, 1).view(np.uint8)
        blocks[:, 2::2] = (first & 15) | (second << 4)
        blocks[:, 3::2] = (first >> 4) | (second & 0xF0)
        return blocks.tobytes()

    def q6_k(self) -> bytes:
        """Blocks of GGUF: 256 inputs of 6 bits around 32, whole scales for 16 of them, and one for all."""
        codes = (self.signed() + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
        low, high = codes & 15, codes >> 4
        blocks = np.empty((len(codes), 210), np.uint8)
        lower = np.stack(
            (low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), axis=2
        )
        blocks[:, :128] = lower.reshape(-1, 128)
        upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
        blocks[:, 128:192] = upper.reshape(-1, 64)
        scales = np.repeat(self.sixteenths, 2, axis=1)
        blocks[:, 192:208] = scales.reshape(-1, 16).view(np.uint8)
        blocks[:, 208:] = np.array([STEP / 16], np.float16).view(np.uint8)
        return blocks.tobytes()


class Pool:
    """Makes matrices of random weights, fast: pieces of a pool, at places of their own."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        low, high = generator.integers(
            1, 16, (2, _POOL_BYTES), np.uint8
        )  # around 8, the mean is zero
        self._codes = low | high << 4
        self._generator = generator

    def matrix(self, num_out: int, num_in: int) -> Matrix:
        """Make a matrix whose outputs are about as large as its inputs."""
        size = num_out * num_in // 2
        assert size <= _POOL_BYTES // 2
        start = int(self._generator.integers(0, _POOL_BYTES - size))
        codes = self._codes[start : start + size].reshape(num_out, -1)
        usual = round(16 / STEP / 4.3 / num_in**0.5)
        groups = num_out, num_in // GROUP
        spread = self._generator.integers(max(1, usual // 2), usual * 3 // 2 + 1, groups)
        return Matrix(num_out, num_in, codes, spread.astype(np.int8))


def parts_of(num_out: int, most: int) -> Iterator[int]:
    """Cut a tall matrix into numbers of rows that are at most ``most``."""
    while num_out:
        yield min(num_out, most)
        num_out -= min(num_out, most)
