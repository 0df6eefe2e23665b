"""The paged KV cache: keys and values of past tokens, in blocks."""

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moesaic.models.configuration.architecture import ModelConfig


class KVCache:
    """``config.kv_width`` numbers per layer and cached token, block after block.

    The numbers are keys and values, or the latent and the shared rotated key. The kernels of
    attention decide which, and how the tokens of a block are laid out.

    Attributes:
        on_copy: called with the blocks that are about to be copied, for others that hold parts of
            this cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        one_for_all: bool = False,
    ) -> None:
        """Reserve ``num_blocks`` blocks of ``block_size`` tokens in every layer. On a CPU, blocks take memory
        when they are first written to.

        ``one_for_all``: the layers use the same blocks, each after the one before.
        """
        self.num_blocks, self.block_size, self.one_for_all = num_blocks, block_size, one_for_all
        self.on_copy: Callable[[Sequence[tuple[int, int]]], None] | None = None
        shape = (num_blocks * block_size, config.kv_width)
        num_separate = 1 if one_for_all else config.num_layers
        on_cpu = device is None or device.type == "cpu"
        self._separate = [
            _untouched_zeros(shape, dtype)
            if on_cpu
            else torch.zeros(shape, dtype=dtype, device=device)
            for _ in range(num_separate)
        ]
        self._layers = self._separate * (config.num_layers // num_separate)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._separate)

    def rows(self, layer: int) -> Tensor:
        """Return the cached rows of a layer, ``[tokens, kv_width]``; not a copy."""
        return self._layers[layer]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer; no block is copied to twice."""
        if not pairs:
            return
        if self.on_copy is not None:
            self.on_copy(pairs)
        source, target = zip(*pairs, strict=True)
        for layer in self._separate:
            blocks = layer.view(self.num_blocks, self.block_size, -1)
            blocks[list(target)] = blocks[list(source)]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that the system makes page by page, as they are written to; torch would write them all at once."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
