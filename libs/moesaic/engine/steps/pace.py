"""The pace of steps with prompts: they get so many rows that they take about as long as they should. Pure.

A step takes a time of its own, to read the weights, and a time for each row. Both are fitted to the
last steps, the newest counting most; the first is at most what a whole step took lately. Rows are
counted by what they cost (``RowCosts``).

=============================================  =====================================================
Steps so far                                   Rows of the next step
=============================================  =====================================================
tell both times                                as many as fit into what a step should take
need most of it for themselves                 as many as take as long again; twice as long if no
                                               answer waits: fewer rows would cost more than they save
were all alike, and tell neither time          half as many, or, of few, half as many again
=============================================  =====================================================
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence
from moesaic.prefix.flops import ModelFlops

LEAST_ROWS = 64  # fewer read almost as many weights
MEASURED_ROWS = 16  # of prompts, in a step that tells something
FIRST_ROWS = 64  # of a step before anything is known
GROWTH = 4  # times the most rows that were measured lately
FORGET = 0.8  # what a step counts once another one was measured
FORGET_LEAST = 1.05  # times longer is the shortest step so far, once another one was measured
MOST_REMEMBERED = 1 << 14  # costs


class RowAllowance(NamedTuple):
    """Bounds on the rows of a step with prompts."""

    part: float  # of the time that a step should take, its own time included
    times_alone: float  # its own time, if that is more
    least_rows: int  # of prompts, however long they take


ALONE = RowAllowance(1.0, 2.0, LEAST_ROWS)
BESIDE_ANSWERS = RowAllowance(1.0, 1.0, LEAST_ROWS)
IN_TURN = RowAllowance(0.4, 1.0, LEAST_ROWS)  # where several tenants have work these days
BESIDE_OTHERS = RowAllowance(0.1, 0.5, 16)  # prompts of one tenant, beside answers of another
MANY_ANSWERS = RowAllowance(0.1, 0.0, 16)  # of one tenant, beside anything of another


class StepPace:
    """Derives the rows of the next step from the times that steps took."""

    def __init__(self, target_s: float, most_rows: float) -> None:
        """Steps should take ``target_s``; with 0 they have ``most_rows``, however long that takes."""
        self._target_s, self._most_rows = target_s, most_rows
        self._largest = FIRST_ROWS / GROWTH  # of the rows measured lately
        # Of a step without rows, and of each row.
        self._alone_s, self._row_s = 0.0, math.ulp(1.0)
        self._least_s = math.inf  # of a whole step, lately
        self._alike = False  # the steps that were measured
        # Weighted sums
        self._n = self._rows = self._s = self._rows_rows = self._rows_s = 0.0

    def rows(self, allowance: RowAllowance = ALONE) -> int:
        """Return how many rows the next step may have, if it has any of prompts."""
        if not self._target_s:
            return int(self._most_rows)
        part, times_alone, least = allowance
        rows_s = max(self._target_s * part - self._alone_s, self._alone_s * times_alone)
        fitting = max(least, rows_s / self._row_s)
        mean_rows = self._rows / max(1.0, self._n)
        again = self._alike and abs(fitting - mean_rows) < mean_rows / 4
        if again and fitting < self._most_rows:
            fitting *= 0.5 if fitting >= 1.75 * least else 1.5
        return int(min(self._most_rows, max(least, min(fitting, GROWTH * self._largest))))

    def took(self, prompt_rows: float, seconds: float, answer_rows: float = 0) -> None:
        """Take note of how long a step with so many rows took."""
        if seconds <= 0:
            return
        self._least_s = min(self._least_s * FORGET_LEAST, seconds)
        if prompt_rows < MEASURED_ROWS:
            return
        rows = prompt_rows + answer_rows
        self._largest = max(rows, self._largest * FORGET)
        self._n = self._n * FORGET + 1
        self._rows = self._rows * FORGET + rows
        self._s = self._s * FORGET + seconds
        self._rows_rows = self._rows_rows * FORGET + rows * rows
        self._rows_s = self._rows_s * FORGET + rows * seconds
        self._alone_s, self._row_s = self._fit()

    def failed(self, prompt_rows: float, answer_rows: float = 0) -> None:
        """Take note that a step with so many rows failed, perhaps since it took too long."""
        rows = prompt_rows + answer_rows
        if prompt_rows >= MEASURED_ROWS:
            self._largest = min(self._largest, rows / 2 / GROWTH)

    def _fit(self) -> tuple[float, float]:
        mean_rows, mean_s = self._rows / self._n, self._s / self._n
        spread = self._rows_rows / self._n - mean_rows**2
        row_s = mean_s / mean_rows
        self._alike = spread <= (mean_rows / 8) ** 2
        if not self._alike:
            slope = (self._rows_s / self._n - mean_rows * mean_s) / spread
            row_s = min(row_s, slope) if slope > 0 else row_s
        # Unlike rows that take unlike times would else pass for a step's own time.
        alone_s = min(self._least_s, max(0.0, mean_s - row_s * mean_rows))
        return alone_s, max((mean_s - alone_s) / mean_rows, math.ulp(1.0))


class RowCosts:
    """Costs of one model's rows, by the FLOPs they take: a row far into a context sees more keys.

    A cost of 1 is that of a prompt's first row, whose logits nobody wants.
    """

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
            flops += 0 if chunk.pools else self._flops.head * chunk.wanted
        return flops / self._unit
