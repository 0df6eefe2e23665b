"""How tenants share a step: whose answers go on in it, and how many rows of prompts each may add. Pure.

An answer gets a token a step. A tenant with so many answers that steps take long makes everyone
wait, so beside other tenants' work some of them go on in this step and the rest in the next ones,
in turn. Prompts make steps longer still. Beside an answer of another tenant they have few rows,
unless that one's answers take turns already.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from moesaic.engine.light_steps import Party
from moesaic.engine.pace import ALONE, BESIDE_ANSWERS, BESIDE_OTHERS, MANY_ANSWERS, Pace
from moesaic.engine.sequences import Answer, Work

TIMES_THE_FEWEST = 4  # works of another tenant, so that tenants that are about as busy do not wait


class StepSharing:
    """What the next step may have, given what runs.

    Attributes:
        answers: those that go on, by rank.
    """

    def __init__(self, running: Sequence[Work], pace: Pace) -> None:
        self._pace = pace
        works: Counter[Party] = Counter()
        decoding: dict[Party, list[Answer]] = {}
        for work in running:
            party = work.claim.party
            works[party] += 1
            if isinstance(work, Answer) and work.decodes:
                decoding.setdefault(party, []).append(work)
        most = pace.rows(MANY_ANSWERS) if len(works) > 1 else len(running)
        due = {
            party: _due(all_, max(most, _fair(party, works))) for party, all_ in decoding.items()
        }
        going_on = set(map(id, itertools.chain(*due.values())))
        self.answers = [w for w in running if id(w) in going_on and isinstance(w, Answer)]
        self._answering = {tenant for _, tenant in decoding}
        self._undivided = {party[1] for party in due if len(due[party]) == len(decoding[party])}

    def prompt_rows(self, tenant: str) -> int:
        """Rows of prompts after which this tenant may add no more."""
        allowance = BESIDE_ANSWERS if self._answering else ALONE
        if self._undivided - {tenant}:
            allowance = BESIDE_OTHERS
        return max(allowance.least_rows, self._pace.rows(allowance) - len(self.answers))


def _fair(party: Party, works: Mapping[Party, int]) -> int:
    """How many answers of a party may go on however long that takes, given how many works of each run."""
    others = [n for other, n in works.items() if other[1] != party[1] and other[0] <= party[0]]
    fewest = min(others, default=works[party])
    return TIMES_THE_FEWEST * fewest


def _due(answers: list[Answer], most: int) -> list[Answer]:
    """Those that have waited longest."""
    if len(answers) <= most:
        return answers
    return sorted(answers, key=attrgetter("last_step"))[:most]
