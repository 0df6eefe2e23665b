"""Sharing of a step among tenants: which generations go on in it, how many rows each tenant's prompts get. Pure.

A generation gets a token a step. A tenant with so many generations that steps take long would make
the others wait, so beside other tenants only some of these go on, in turn. Prompts make steps
longer still. Beside a few generations of another tenant they get few rows; beside many, which make
steps long themselves, as many as where tenants take turns.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from moesaic.engine.sequences.sequence import AnySequence, GenerationSequence
from moesaic.engine.steps.light_steps import Party
from moesaic.engine.steps.pace import (
    ALONE,
    BESIDE_ANSWERS,
    BESIDE_OTHERS,
    IN_TURN,
    MANY_ANSWERS,
    StepPace,
)
from moesaic.engine.steps.row_costs import RowCosts

TIMES_THE_FEWEST = 4  # sequences of another tenant, so that tenants about as busy do not wait


class PromptRoom(NamedTuple):
    """Room for the rows of prompts in a step."""

    least_rows: int  # whatever they cost
    cost: float  # of more

    def left(self, num_rows: int, cost: float, each: float) -> int:
        """Return how many rows of a cost of ``each`` have room beside those there are, of a cost of ``cost``.

        It is one at least while there is any room.
        """
        return max(self.least_rows - num_rows, math.ceil((self.cost - cost) / each))


class StepSharing:
    """The shares of the next step, given the sequences that run.

    Attributes:
        going_on: generations that get a token, by rank.
    """

    def __init__(
        self,
        running: Sequence[AnySequence],
        pace: StepPace,
        costs: RowCosts,
        *,
        in_turn: bool = False,
    ) -> None:
        """Share the next step.

        Args:
            running: the sequences that have begun.
            pace: of steps.
            costs: of rows.
            in_turn: several tenants had rows lately.
        """
        self._pace, self._costs, self._in_turn = pace, costs, in_turn
        sequences: Counter[Party] = Counter()
        decoding: dict[Party, list[GenerationSequence]] = {}
        for sequence in running:
            party = sequence.claim.party
            sequences[party] += 1
            if isinstance(sequence, GenerationSequence) and sequence.decodes:
                decoding.setdefault(party, []).append(sequence)
        most = len(running)
        if len(sequences) > 1 and decoding:
            each = statistics.fmean(
                [costs.at(w.computed, True) for w in itertools.chain(*decoding.values())]
            )
            most = max(MANY_ANSWERS.least_rows, int(pace.rows(MANY_ANSWERS) / each))
        due = {
            party: _due(its, max(most, _fair(party, sequences))) for party, its in decoding.items()
        }
        going_on = set(map(id, itertools.chain(*due.values())))
        self.going_on = [
            w for w in running if id(w) in going_on and isinstance(w, GenerationSequence)
        ]
        self._answering = {tenant for _, tenant in decoding}
        few = MANY_ANSWERS.least_rows
        self._few = {party[1] for party, its in decoding.items() if len(its) <= few}

    def prompts(self, tenant: str) -> PromptRoom:
        """Return the room for prompts, after which this tenant may add no more."""
        allowance = BESIDE_ANSWERS if self._answering else ALONE
        if self._in_turn:
            allowance = IN_TURN
        if self._few - {tenant}:
            allowance = BESIDE_OTHERS
        answers_cost = sum([self._costs.at(w.computed, True) for w in self.going_on])
        return PromptRoom(allowance.least_rows, self._pace.rows(allowance) - answers_cost)


def _fair(party: Party, sequences: Mapping[Party, int]) -> int:
    """Return how many generations of a party go on however long that takes.

    Args:
        party: one of ``sequences``.
        sequences: how many of each party run.
    """
    others = [n for other, n in sequences.items() if other[1] != party[1] and other[0] <= party[0]]
    fewest = min(others, default=sequences[party])
    return TIMES_THE_FEWEST * fewest


def _due(generations: list[GenerationSequence], most: int) -> list[GenerationSequence]:
    """Choose those that have waited longest, ``most`` at the most."""
    if len(generations) <= most:
        return generations
    return sorted(generations, key=attrgetter("last_step"))[:most]
