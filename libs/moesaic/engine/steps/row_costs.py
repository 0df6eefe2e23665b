"""Costs of rows, so that steps of unlike rows compare: a row far into a context sees more keys. Pure.

A cost of 1 is that of a prompt's first row, whose logits nobody wants.
"""

from collections.abc import Iterable
from functools import lru_cache

from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence
from moesaic.prefix.flops import ModelFlops

MOST_REMEMBERED = 1 << 14  # costs


class RowCosts:
    """Costs of one model's rows, by the FLOPs they take."""

    def __init__(self, flops: ModelFlops) -> None:
        self._flops = flops
        self._unit = flops.span(0, 1)
        self.at = lru_cache(MOST_REMEMBERED)(self._at)

    def _at(self, position: int, wanted: bool) -> float:
        """Return the cost of the row at ``position``; ``wanted``: its logits are."""
        flops = self._flops.span(position, position + 1) + self._flops.head * wanted
        return flops / self._unit

    def next_row(self, sequence: AnySequence) -> float:
        """Return the cost of the first row that ``sequence`` has to compute."""
        candidates = sequence.computed == len(sequence.tokens)
        wanted = candidates if isinstance(sequence, ScoringSequence) else sequence.decodes
        return self.at(sequence.computed, wanted)

    def of(self, chunks: Iterable[Chunk]) -> float:
        """Return the cost of all rows of some chunks."""
        flops = 0
        for chunk in chunks:
            flops += self._flops.span(chunk.start, chunk.start + len(chunk.token_ids))
            flops += self._flops.head * chunk.wanted
        return flops / self._unit
