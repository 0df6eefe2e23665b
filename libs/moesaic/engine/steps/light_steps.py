"""Steps for light tenants alone: they want little while others want more than a step. Pure.

In a step with everyone's rows, an answer of a few tokens takes many times as long as alone. So light
tenants go on alone for as long as steps of everyone took, which is half the time at most. Where
rows cost little, as where reading the weights is most of a step, nothing would be gained: then
everyone runs together.
"""

from collections.abc import Iterable, Mapping

from moesaic.engine.sequences.sequence import AnySequence
from moesaic.engine.steps.row_costs import RowCosts

LIGHT_PART = 0.5  # of a step, that light tenants together may want
TIMES_MORE = 8  # what light tenants want: others that want so much may have less than a step of it
TIMES_FASTER = 1.5  # that a light step of answers must be, beside one of everyone
TARGETS_SAVED = 1.0  # steps as long as they should be, of which the time is still had later
FORGET = 0.8  # what the mean of steps so far counts beside the newest
TRUST = 0.99  # of light steps' mean, after another step; in time they are tried again

Party = tuple[int, str]  # see ``Claim.party``


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
        self._light_s = self._common_s = 0.0  # means
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
