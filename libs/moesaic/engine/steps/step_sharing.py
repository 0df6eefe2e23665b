"""Sharing of a step among tenants: which generations go on in it, how many rows each tenant's prompts get. Pure.

A generation gets a token a step. A tenant with so many generations that steps take long would make
the others wait, so beside other tenants only some of these go on, in turn. Prompts make steps
longer still. Beside a generation of another tenant they get few rows, unless that tenant's
generations take turns already.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from moesaic.engine.sequences.sequence import AnySequence, GenerationSequence
from moesaic.engine.steps.light_steps import Party
from moesaic.engine.steps.pace import ALONE, BESIDE_ANSWERS, BESIDE_OTHERS, MANY_ANSWERS, StepPace

TIMES_THE_FEWEST = 4  # sequences of another tenant, so that tenants about as busy do not wait


class StepSharing:
    """The shares of the next step, given the sequences that run.

    Attributes:
        going_on: generations that get a token, by rank.
    """

    def __init__(self, running: Sequence[AnySequence], pace: StepPace) -> None:
        self._pace = pace
        sequences: Counter[Party] = Counter()
        decoding: dict[Party, list[GenerationSequence]] = {}
        for sequence in running:
            party = sequence.claim.party
            sequences[party] += 1
            if isinstance(sequence, GenerationSequence) and sequence.decodes:
                decoding.setdefault(party, []).append(sequence)
        most = pace.rows(MANY_ANSWERS) if len(sequences) > 1 else len(running)
        due = {
            party: _due(its, max(most, _fair(party, sequences))) for party, its in decoding.items()
        }
        going_on = set(map(id, itertools.chain(*due.values())))
        self.going_on = [
            w for w in running if id(w) in going_on and isinstance(w, GenerationSequence)
        ]
        self._answering = {tenant for _, tenant in decoding}
        self._undivided = {party[1] for party in due if len(due[party]) == len(decoding[party])}

    def prompt_rows(self, tenant: str) -> int:
        """Return the rows of prompts after which this tenant may add no more."""
        allowance = BESIDE_ANSWERS if self._answering else ALONE
        if self._undivided - {tenant}:
            allowance = BESIDE_OTHERS
        return max(allowance.least_rows, self._pace.rows(allowance) - len(self.going_on))


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
