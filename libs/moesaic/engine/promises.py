"""Promises to the rows of a step under brownout, and the account of what came of them.

Rows of prompts and rows of answers are two phases, with a threshold each. A request may want more than its
phase has; rows that several requests share get the most that any of them wants.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.brownout.control.contract import EXACT, Thresholds
from moesaic.brownout.split import Level
from moesaic.dispatch.contract import Step
from moesaic.engine.sequences.sequence import AnySequence, Chunk
from moesaic.kernels.promised import PromisedRows
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.layers.step_batch import StepBatch

PREFILL, DECODE, PHASES = 0, 1, 2


class ChoiceCounts(NamedTuple):
    """Choices of rows that were computed.

    Attributes:
        choices: all, by phase.
        degraded: those that their own experts did not serve, int64 ``[PHASES, num_layers]``; None: none.
    """

    choices: Sequence[int] = (0,) * PHASES
    degraded: Tensor | None = None


class Promises:
    """Promises of one engine."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """``config`` says how many choices a row has; they are made on ``device``."""
        self._device = device
        layers, top_k = set(config.moe_layers), config.moe.top_k
        last = config.num_layers - 1
        self._choices = top_k * len(layers - {last})  # of every row
        self._last_choices = top_k if last in layers else 0  # of rows whose logits are wanted
        self._top_k, self._layers, self._last = top_k, layers, last
        self._num_layers = config.num_layers

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
            thresholds = thresholds if step.substitution is not None else EXACT
        elif step.substitution is None or min(thresholds.prefill, thresholds.decode) >= 1:
            return None
        levels: dict[Level, int] = {}
        level_of_row: list[int] = []
        for index, chunk in enumerate(chunks):
            level = _level(chunk, thresholds, users[index] if users else (chunk.sequence,))
            at = levels.setdefault(level, len(levels))
            level_of_row += [at] * len(chunk.token_ids)
        if all(level.threshold >= 1 for level in levels) and not step.has_lost:
            return None
        return PromisedRows(tuple(levels), level_of_row, self._device, self._num_layers)

    def count(self, chunks: Sequence[Chunk], batches: Sequence[StepBatch]) -> ChoiceCounts:
        """Take the rows of a successful step into the accounts of their sequences.

        Args:
            chunks: all that were computed.
            batches: the parts of the step, in order.
        """
        if all(batch.promised is None for batch in batches):
            thresholds, degraded, counted = None, None, None
        else:
            thresholds, degraded = _outcome(batches)
            counted = torch.zeros(PHASES, self._num_layers, dtype=torch.int64)
        all_choices, start = [0] * PHASES, 0
        for chunk in chunks:
            num_rows = len(chunk.token_ids)
            choices = num_rows * self._choices + chunk.wanted * self._last_choices
            phase = _phase(chunk)
            all_choices[phase] += choices
            if thresholds is None or degraded is None or counted is None:
                chunk.sequence.account.add(num_rows, 1.0, choices)
            else:
                own = degraded[:, start : start + num_rows]
                counted[phase] += own.sum(dim=1)
                _count(chunk, chunk.sequence, thresholds[start], choices, own.sum(dim=0))
            start += num_rows
        return ChoiceCounts(all_choices, counted)

    def count_layer(
        self,
        layer: int,
        chunks: Sequence[Chunk],
        users: Sequence[Sequence[AnySequence]],
        batch: StepBatch,
    ) -> ChoiceCounts:
        """The same of rows that passed one layer, for all sequences that they are for."""
        thresholds, degraded = _outcome([batch]) if batch.promised else (None, None)
        counted = torch.zeros(PHASES, self._num_layers, dtype=torch.int64)
        all_choices, start = [0] * PHASES, 0
        for chunk, own in zip(chunks, users, strict=True):
            num_rows = len(chunk.token_ids)
            passing = chunk.wanted if layer == self._last else num_rows
            choices = passing * self._top_k if layer in self._layers else 0
            num_degraded = 0
            if degraded is not None:
                num_degraded = int(degraded[layer, start : start + num_rows].sum())
            all_choices[PREFILL] += choices
            counted[PREFILL, layer] += num_degraded
            for user in own:
                threshold = 1.0 if thresholds is None else thresholds[start]
                # A row counts a part in each layer, for what it is promised may change on its way.
                rows = num_rows / self._num_layers
                user.account.add(rows, threshold, choices, num_degraded)
            start += num_rows
        return ChoiceCounts(all_choices, counted)


def _phase(chunk: Chunk) -> int:
    return DECODE if chunk.sequence.decodes else PREFILL


def _level(chunk: Chunk, thresholds: Thresholds, users: Sequence[AnySequence]) -> Level:
    phase = _phase(chunk)
    threshold = thresholds.decode if phase == DECODE else thresholds.prefill
    wanted = max((user.request.min_threshold for user in users), default=0.0)
    if wanted <= threshold:
        return Level(threshold, phase)
    # In hundredths, or there could be more levels than a batch may have.
    wanted = math.ceil(wanted * 100 - 1e-9) / 100
    # Counted by themselves: of many rows' choices those of a few may be the least popular.
    return Level(wanted, phase + PHASES * (1 + Level(wanted).parts))


def _outcome(batches: Sequence[StepBatch]) -> tuple[list[float], Tensor]:
    """The threshold of each row of a step, and its degraded choices, int32 ``[num_layers, T]``."""
    num_layers = next(len(b.promised.degraded) for b in batches if b.promised is not None)
    thresholds: list[float] = []
    degraded: list[Tensor] = []
    for batch in batches:
        promised, num_rows = batch.promised, len(batch.token_ids)
        # All rows of this part get everything.
        if promised is None:
            thresholds += [1.0] * num_rows
            degraded.append(torch.zeros(num_layers, num_rows, dtype=torch.int32))
        else:
            thresholds += [promised.levels[at].threshold for at in promised.level_of_row.tolist()]
            degraded.append(promised.settle())
    return thresholds, torch.cat(degraded, dim=1)


def _count(
    chunk: Chunk, sequence: AnySequence, threshold: float, choices: int, degraded: Tensor
) -> None:
    sequence.account.add(len(degraded), threshold, choices, int(degraded.sum()))
    first = degraded.nonzero()
    if len(first) and chunk.candidate is None:
        clean = chunk.start + int(first[0])
        sequence.account.clean = min(sequence.account.clean, clean)
