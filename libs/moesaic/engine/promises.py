"""Promises to the rows of a step under brownout, and the account of what came of them.

Rows of prompts and rows of answers are two phases, with a threshold each. A request may want more than its
phase has; rows that several requests share get the most that any of them wants.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.brownout.control.contract import EXACT, Thresholds
from moesaic.brownout.split import Level
from moesaic.dispatch.contract import Step
from moesaic.engine.sequences.sequence import AnySequence, Chunk
from moesaic.kernels.promised import PromisedRows
from moesaic.models.configuration.architecture import ModelConfig

PREFILL, DECODE = 0, 1  # phases


class Promising:
    """Promises of one engine."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """``config`` says how many choices a row has; they are made on ``device``."""
        self._device = device
        layers, top_k = set(config.moe_layers), config.moe.top_k
        last = config.num_layers - 1
        self._choices = top_k * len(layers - {last})  # of every row
        self._last_choices = top_k if last in layers else 0  # of rows whose logits are wanted
        self._top_k, self._layers, self._last = top_k, layers, last
        self._num_degraded = self._num_choices = 0  # since they were taken

    def take_counts(self) -> tuple[int, int]:
        """Take the number of degraded choices since the last call, and of all choices."""
        counts = self._num_degraded, self._num_choices
        self._num_degraded = self._num_choices = 0
        return counts

    def promise(
        self,
        step: Step,
        thresholds: Thresholds,
        chunks: Sequence[Chunk],
        users: Sequence[Sequence[AnySequence]] | None = None,
    ) -> PromisedRows | None:
        """Promise the rows of some chunks what they get under ``thresholds``.

        Args:
            step: that they run in.
            thresholds: of this moment.
            chunks: of the batch, in order.
            users: of each chunk, the sequences that its rows are for; None: its own alone.

        Returns:
            None if all rows get everything, or nothing can be degraded.
        """
        if step.has_lost:
            thresholds = thresholds if step.rung is not None else EXACT
        elif step.rung is None or min(thresholds.prefill, thresholds.decode) >= 1:
            return None
        levels: dict[Level, int] = {}
        level_of_row: list[int] = []
        for index, chunk in enumerate(chunks):
            level = _level(chunk, thresholds, users[index] if users else (chunk.sequence,))
            at = levels.setdefault(level, len(levels))
            level_of_row += [at] * len(chunk.token_ids)
        if all(level.threshold >= 1 for level in levels) and not step.has_lost:
            return None
        return PromisedRows(tuple(levels), level_of_row, self._device)

    def count(self, chunks: Sequence[Chunk], promised: Sequence[PromisedRows | None]) -> None:
        """Take the rows of a successful step into the accounts of their sequences.

        Args:
            chunks: all that were computed.
            promised: to the rows of each part of the step, in order.
        """
        thresholds, degraded = _settled(promised) if any(promised) else (None, None)
        start = 0
        for chunk in chunks:
            num_rows = len(chunk.token_ids)
            choices = num_rows * self._choices + chunk.wanted * self._last_choices
            self._num_choices += choices
            if thresholds is None or degraded is None:
                chunk.sequence.account.add(num_rows, 1.0, choices)
            else:
                own = degraded[start : start + num_rows]
                self._num_degraded += int(own.sum())
                _count(chunk, chunk.sequence, thresholds[start], choices, own)
            start += num_rows

    def count_layer(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        users: Sequence[Sequence[AnySequence]],
        promised: PromisedRows | None,
    ) -> None:
        """The same of rows that passed one layer, for all sequences that they are for."""
        thresholds, degraded = _settled([promised]) if promised is not None else (None, None)
        start = 0
        for chunk, own in zip(chunks, users, strict=True):
            num_rows = len(chunk.token_ids)
            passing = chunk.wanted if layer == self._last else num_rows
            choices = passing * self._top_k if layer in self._layers else 0
            self._num_choices += choices
            for user in own:
                if thresholds is None or degraded is None:
                    user.account.add(num_rows, 1.0, choices)
                else:
                    rows = degraded[start : start + num_rows]
                    _count(chunk, user, thresholds[start], choices, rows)
            if degraded is not None:
                self._num_degraded += int(degraded[start : start + num_rows].sum())
            start += num_rows


def _level(chunk: Chunk, thresholds: Thresholds, users: Sequence[AnySequence]) -> Level:
    phase = DECODE if chunk.sequence.decodes else PREFILL
    threshold = thresholds.decode if phase == DECODE else thresholds.prefill
    wanted = max((user.request.min_threshold for user in users), default=0.0)
    return Level(max(threshold, wanted), phase)


def _settled(promised: Sequence[PromisedRows | None]) -> tuple[list[float], Tensor]:
    """The threshold of each row of a step, and its degraded choices, int32 ``[T]``."""
    whole = [part for part in promised if part is not None]
    assert len(whole) == len(promised)
    thresholds = [
        part.levels[level].threshold for part in whole for level in part.level_of_row.tolist()
    ]
    return thresholds, torch.cat([part.settle() for part in whole])


def _count(
    chunk: Chunk, sequence: AnySequence, threshold: float, choices: int, degraded: Tensor
) -> None:
    sequence.account.add(len(degraded), threshold, choices, int(degraded.sum()))
    first = degraded.nonzero()
    if len(first) and chunk.candidate is None:
        clean = chunk.start + int(first[0])
        sequence.account.clean = min(sequence.account.clean, clean)
