"""Whole steps: one call each, on a CPU."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import Attending, DecoderStepKernel, StepInputs
from moesaic.models.layers.rope import RotaryEmbedding
from moesaic.models.layers.step_batch import StepBatch
from moesaic.native.structs import ApartArgs


class WholeSteps:
    """Computes as ``Decoder.forward`` does, with the same bits, over one cache."""

    def __init__(self, kernel: DecoderStepKernel, rotary: RotaryEmbedding, block_size: int) -> None:
        """Take the parts; ``Decoder.whole_steps`` has them."""
        self._kernel, self._rotary, self._block_size = kernel, rotary, block_size

    def takes(self, batch: StepBatch) -> bool:
        """Return true: it takes any step."""
        return True

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far; grows while a step runs."""
        return self._kernel.layers_done

    def forward(self, batch: StepBatch) -> Tensor:
        """See ``Decoder.forward``."""
        return self._kernel(self._inputs(batch))

    def forward_apart(self, batches: Sequence[StepBatch], apart: ApartArgs) -> tuple[Tensor, Any]:
        """Compute the parts of one step, whose experts are in other processes.

        See ``DecoderStepKernel.apart``.
        """
        return self._kernel.apart([self._inputs(batch) for batch in batches], apart)

    def _inputs(self, batch: StepBatch) -> StepInputs:
        # Lists: for a few rows, a call of numpy's or torch's takes longer than what it does.
        size, counts, tables = self._block_size, batch.sequence_rows, batch.block_tables
        positions, ends = batch.positions, list(accumulate(counts))
        assert len(counts) == len(tables) == len(batch.wanted)
        assert all(0 <= few <= count for few, count in zip(batch.wanted, counts, strict=True))
        lengths = [positions[end - 1] + 1 for end in ends]
        offsets = [
            table[position // size] * size + position % size
            for end, count, table in zip(ends, counts, tables, strict=True)
            for position in positions[end - count : end]
        ]
        last: tuple[Attending, list[int]] | None = None
        if (wanted := batch.wanted) != counts:
            assert batch.attending is not None
            wanted = wanted if any(wanted) else [1, *wanted[1:]]
            mine = [i for i, few in enumerate(wanted) if few]
            last = _attending(wanted, lengths, tables, mine), batch.attending
        promised = None
        if batch.promised is not None and batch.promised_last is not None:
            promised = batch.promised, batch.promised_last
        return StepInputs(
            batch.token_ids,
            positions,
            offsets,
            self._rotary.up_to(max(lengths), torch.float32),
            Attending(counts, lengths, tables),
            last,
            logits=any(batch.wanted),
            promised=promised,
        )


def _attending(
    counts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    which: Sequence[int],
) -> Attending:
    return Attending(
        [counts[i] for i in which], [lengths[i] for i in which], [tables[i] for i in which]
    )
