"""Work that an engine has yet to compute, by the stream that asked for it; gateways tell each other."""

from collections.abc import Iterable
from typing import NamedTuple

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
