"""The load of an engine, as gateways and operators see it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.engine.brownout import BrownoutLoad
from moesaic.engine.sequences.sequence import AnySequence, ScoringSequence
from moesaic.prefix.flops import ModelFlops


class Outstanding(NamedTuple):
    """Requests, the tokens of their prompts (and one of each answer), and the FLOPs of these."""

    num_requests: int = 0
    num_tokens: int = 0
    flops: int = 0

    def plus(self, other: "Outstanding") -> "Outstanding":
        """Add the two."""
        return Outstanding(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True)
class EngineLoad:
    """The work of an engine, as routing and operators see it."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    epoch: int
    waiting_for: tuple[str, ...]
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict)  # by stream
    brownout: BrownoutLoad = field(default_factory=BrownoutLoad)
    num_rows: int = 0  # computed since the start


def outstanding_of(sequences: Iterable[AnySequence], flops: ModelFlops) -> dict[int, Outstanding]:
    """Sum up what is outstanding, by stream.

    Waiting prompts count as if nothing of them were cached, and swept ones count whole until they end.
    """
    totals: dict[int, Outstanding] = {}
    for sequence in sequences:
        stream = sequence.request.key.stream
        totals[stream] = totals.get(stream, Outstanding()).plus(_of(sequence, flops))
    return totals


def _of(sequence: AnySequence, flops: ModelFlops) -> Outstanding:
    length = len(sequence.tokens)
    left, cost = sequence.rows_left, flops.span(sequence.computed, length) + flops.head
    if isinstance(sequence, ScoringSequence):
        cost += flops.continuation(length, left - (length - sequence.computed))
    return Outstanding(1, max(left, 1), cost)
