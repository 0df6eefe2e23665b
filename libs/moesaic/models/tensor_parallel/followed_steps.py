"""Captured steps in a rank behind the first: graphs of its parts, launched when the first one says so."""

from contextlib import AbstractContextManager
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.warm_up import within_memory
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import (
    DecodeShapes,
    StaticDecode,
    StepTensors,
    compile_kernels,
)
from moesaic.models.tensor_parallel.group import RankGroup, RankMessage
from moesaic.models.tensor_parallel.programs import (
    CapturedForm,
    Part,
    RanksDiffer,
    described,
    parts_of,
)

Attending = tuple[Rotation, AttentionPlan, KVCache]
"""What the rows of a step attend to."""


def compute_part(
    decoder: Decoder, group: RankGroup, part: Part, rows: Tensor, attending: Attending | None
) -> None:
    """Compute this rank's part of a product of ``rows``, and give it to the first rank."""
    kind, index = part
    if kind == RankMessage.HEAD:
        group.side_by_side(decoder.head(rows))
        return
    layer = decoder.layers[index]
    if kind == RankMessage.ATTEND:
        assert attending is not None
        group.sum(layer.attention(rows, *attending))
        return
    mlp = layer.dense or (layer.shared and layer.shared.mlp)
    assert mlp is not None
    group.sum(mlp(rows))


class FollowedSteps:
    """This rank's parts of the captured steps over one cache."""

    def __init__(
        self, decoder: Decoder, group: RankGroup, cache: KVCache, form: CapturedForm
    ) -> None:
        """Reserve their tensors, and tell the first rank what they are going to be."""
        self.cache = cache
        self._decoder, self._group = decoder, group
        self._shapes = DecodeShapes(form.max_rows, form.max_length)
        self._tensors = StepTensors(decoder, cache, self._shapes)
        self._parts = parts_of(decoder.config, form)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        group.agree(described(decoder.config, form, cache.block_size))

    def capture(self, size: int) -> None:
        """Capture the parts of a step of ``size`` rows, as the first rank does meanwhile."""
        step = _FollowedStep(self._decoder, self._group, self.cache, self._tensors, size)
        everything = list(chain.from_iterable(self._parts))
        with memory_for(self._decoder.device, size):
            compile_kernels(self._decoder.device, partial(step.compute, everything))
            self._graphs[size] = [
                self._tensors.captured(partial(step.compute, parts)) for parts in self._parts
            ]

    def compute(self, size: int, content: Tensor) -> None:
        """Compute the parts of a step.

        Args:
            size: size that the first rank has chosen.
            content: what ``told_step`` has made of it.

        Raises:
            RanksDiffer: it is not the size that its rows have here.
        """
        numbers = content.numpy()
        facts = numbers[: 3 * 8 * size].view(np.int64).reshape(3, size)
        tables = numbers[3 * 8 * size :].view(np.int32).reshape(size, -1)
        # Rows that fill the step up are not kept.
        num_rows = int(np.count_nonzero(facts[2] >= 0))
        chosen = self._shapes.size_for(num_rows, int(facts[1].max()))
        if chosen != size or size not in self._graphs:
            raise RanksDiffer(
                f"rank 0 computes {num_rows} rows by a graph of {size}; rank {self._group.rank} "
                f"takes {chosen}, and has {sorted(self._graphs)}"
            )
        self._tensors.put(facts, tables)
        for graph in self._graphs[size]:
            graph.replay()

    def release(self) -> None:
        """See ``StepTensors.release``."""
        self._tensors.release()


def memory_for(device: torch.device, size: int) -> AbstractContextManager[None]:
    """Name the setting to change if a rank has no memory to capture a step of ``size`` rows."""
    return within_memory(device, "--max-num-seqs", f"a captured step of {size} rows")


def told_step(facts: NDArray[np.int64], tables: NDArray[np.int32]) -> Tensor:
    """Write what ``StepTensors.put`` takes as the bytes that ``FollowedSteps.compute`` reads, uint8."""
    return torch.frombuffer(bytearray(facts.tobytes() + tables.tobytes()), dtype=torch.uint8)


class _FollowedStep:
    """The parts of a step of a fixed shape; the rotations of its rows are computed with the first ones."""

    def __init__(
        self,
        decoder: Decoder,
        group: RankGroup,
        cache: KVCache,
        tensors: StepTensors,
        size: int,
    ) -> None:
        self._decoder, self._group, self._cache, self._size = decoder, group, cache, size
        self._step = StaticDecode(decoder, cache, tensors, size)
        self._attending: Attending | None = None

    def compute(self, parts: list[Part]) -> None:
        decoder = self._decoder
        if parts[0] == (RankMessage.ATTEND, 0):
            _, positions, plan = self._step.planned()
            rotation = decoder.rows(positions, plan, self._cache).rotation
            self._attending = rotation, plan, self._cache
        shape = self._size, decoder.config.hidden_size
        for part in parts:
            rows = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
            compute_part(decoder, self._group, part, self._group.spread(rows), self._attending)
