"""What an engine has yet to compute, by the stream that asked for it: gateways tell each other so."""

from collections.abc import Iterable
from typing import NamedTuple

from moesaic.engine.sequences import Score, Work
from moesaic.prefix.flops import ModelFlops


class Outstanding(NamedTuple):
    """Requests, the tokens of their prompts (and one of each answer), and the FLOPs of these."""

    num_requests: int = 0
    num_tokens: int = 0
    flops: int = 0

    def plus(self, other: "Outstanding") -> "Outstanding":
        """Both together."""
        return Outstanding(*(one + two for one, two in zip(self, other, strict=True)))


def outstanding_of(everything: Iterable[Work], flops: ModelFlops) -> dict[int, Outstanding]:
    """By stream. Of what waits nothing is counted as cached, and swept prompts count whole until
    they end."""
    totals: dict[int, Outstanding] = {}
    for work in everything:
        stream = work.request.key.stream
        totals[stream] = totals.get(stream, Outstanding()).plus(_of(work, flops))
    return totals


def _of(work: Work, flops: ModelFlops) -> Outstanding:
    length = len(work.tokens)
    left, cost = work.rows_left, flops.span(work.computed, length) + flops.head
    if isinstance(work, Score):
        cost += flops.continuation(length, left - (length - work.computed))
    return Outstanding(1, max(left, 1), cost)
