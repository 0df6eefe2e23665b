"""Sharing of a step among tenants: which generations go on in it, how many rows each tenant's prompts get. Pure.

A generation gets a token a step. A tenant with so many generations that steps take long would make
the others wait, so beside other tenants only some of these go on, in turn. Prompts make steps
longer still. Beside a few generations of another tenant they get few rows; beside many, which make
steps long themselves, as many as where tenants take turns.

Some tenants want little while others want more than a step. In a step with everyone's rows, an answer
of a few tokens takes many times as long as alone. So light tenants go on alone for as long as steps of
everyone took, which is half the time at most. Where rows cost little, as where reading the weights is
most of a step, nothing would be gained: then everyone runs together.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from moesaic.engine.sequences.sequence import AnySequence, GenerationSequence
from moesaic.engine.steps.pace import (
    ALONE,
    BESIDE_ANSWERS,
    BESIDE_OTHERS,
    IN_TURN,
    MANY_ANSWERS,
    RowCosts,
    StepPace,
)
from moesaic.engine.steps.queues import Party

TIMES_THE_FEWEST = 4  # sequences of another tenant, so that tenants about as busy do not wait
LIGHT_PART = 0.5  # of a step, that light tenants together may want
TIMES_MORE = 8  # what light tenants want: others that want so much may have less than a step of it
TIMES_FASTER = 1.5  # that a light step of answers must be, beside one of everyone
TARGETS_SAVED = 1.0  # steps as long as they should be, of which the time is still had later
FORGET = 0.8  # what the mean of steps so far counts beside the newest
TRUST = 0.99  # of light steps' mean, after another step; in time they are tried again


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


def light_parties(
    running: Iterable[AnySequence],
    waiting: Mapping[tuple[str, int], int],
    most_rows: int,
    costs: RowCosts,
) -> frozenset[Party]:
    """Choose parties of the most urgent level that together want little of a step.

    Args:
        running: sequences that have begun.
        waiting: tokens that wait to be computed, by tenant and priority.
        most_rows: of a step.
        costs: of rows, by which they count.

    Returns:
        None of them unless the others want more than a step, or many times as much as they.
    """
    wanted: dict[Party, float] = {}
    for (tenant, priority), num_tokens in waiting.items():
        party = max(0, priority), tenant
        wanted[party] = wanted.get(party, 0) + num_tokens
    for sequence in running:
        cost = sequence.rows_left * costs.next_row(sequence)
        wanted[sequence.claim.party] = wanted.get(sequence.claim.party, 0) + cost
    level, total = min(wanted, default=(0, ""))[0], sum(wanted.values())
    left = total
    light: set[Party] = set()
    for rows, party in sorted((rows, party) for party, rows in wanted.items() if party[0] == level):
        if total - left + rows > LIGHT_PART * most_rows:
            break
        light.add(party)
        left -= rows
    return frozenset(light if left > min(most_rows, TIMES_MORE * (total - left)) else ())


class LightSteps:
    """Decides when light tenants may have a step for themselves, by the time that steps took."""

    def __init__(self, target_s: float) -> None:
        """Steps should take ``target_s``; with 0 there are no light ones."""
        self._most_s = TARGETS_SAVED * target_s
        self._left_s = 0.0  # that light steps may take
        # Means
        self._light_s = self._common_s = 0.0
        self._trust = 1.0

    @property
    def is_due(self) -> bool:
        """True if the next step is theirs, provided that there are any."""
        light_s = self._trust * self._light_s
        return self._left_s > 0 and self._common_s >= TIMES_FASTER * light_s

    def took(self, seconds: float, *, is_light: bool, has_prompts: bool) -> None:
        """Take note of a step. A light one with prompts does not tell how long others are."""
        if is_light:
            self._left_s -= seconds
            if not has_prompts:
                self._light_s, self._trust = _mean(self._light_s, seconds), 1.0
        else:
            self._left_s = min(self._most_s, self._left_s + seconds)
            self._common_s = _mean(self._common_s, seconds)
            self._trust *= TRUST


def _mean(so_far: float, newest: float) -> float:
    return so_far * FORGET + newest * (1 - FORGET) if so_far else newest
