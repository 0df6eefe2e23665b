"""Chooses the tests of the quick tier and of a turn, by what they cost. Pure.

A test function is cheap if all of its cases together cost less than ``FREE_S``; cheap ones run whole. Of others:

| one case costs | cases that run |
|---|---|
| ``CASE_S`` or less | as many as ``CASE_S`` pays for, at least one: those that bring the most new pairs of parameters |
| more | a sixteenth, by a hash of their names |

Which cases these are depends on ``part``, 0 to 15, which follows the commit: each sixteenth has its turn, and of the
first row other cases are drawn. ``make test-all`` runs all of them.

Of the rest, continuous integration runs the cases that cost ``TURN_S`` or less, and a quarter of the others by the same
hash. Its quarter contains the sixteenth of the quick tier.
"""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from zlib import crc32

FREE_S = 0.2
# A gateway before a scripted worker opens, answers and closes in 0.23 seconds: such tests are worth a run each.
CASE_S = 0.25
PARTS = 16
TURN_S = 0.1
TURNS = 4
COSTS = Path(__file__).with_name("costs.json")
Values = frozenset[tuple[str, Hashable]]


@dataclass(frozen=True)
class Costs:
    """Seconds that tests took on an idle machine, of the clock or of the CPU, whichever are more.

    Attributes:
        functions: by file and name, of functions that cost ``FREE_S`` or more: number of cases, seconds of all.
        others_s: by file, seconds of all other functions together.
    """

    functions: Mapping[str, Mapping[str, tuple[int, float]]]
    others_s: Mapping[str, float]

    @classmethod
    def read(cls) -> "Costs":
        """Read ``costs.json``, which ``make costs`` writes."""
        kept = json.loads(COSTS.read_text(encoding="utf-8"))
        return cls(kept["functions"], kept["others_s"])

    def of_case(self, file: str, function: str) -> float:
        """Seconds of one case of a function; 0: the function is cheap, or new."""
        cases, seconds = self.functions.get(file, {}).get(function, (1, 0.0))
        return seconds / cases

    def of_file(self, file: str, share: str) -> float:
        """Seconds of a file, or what is expected of them in a share of its tests."""
        functions = self.functions.get(file, {}).values()
        whole = self.others_s.get(file, 0.0) + sum(seconds for _, seconds in functions)
        quick = self.others_s.get(file, 0.0) + sum(quick_s(*function) for function in functions)
        turn = sum(turn_s(*function) for function in functions)
        return {"all": whole, "quick": quick, "rest": whole - quick, "turn": turn}[share]


def quick_s(cases: int, seconds: float) -> float:
    """Seconds that the quick tier is expected to spend on a function."""
    each = seconds / cases
    return min(seconds, max(each, CASE_S)) if each <= CASE_S else seconds / PARTS


def turn_s(cases: int, seconds: float) -> float:
    """Seconds that a turn is expected to spend on a function, beside what the quick tier does."""
    rest_s, case_s = seconds - quick_s(cases, seconds), seconds / cases
    if case_s > CASE_S:
        return seconds / TURNS - seconds / PARTS
    return rest_s / TURNS if case_s > TURN_S else rest_s


def has_turn(name: str, part: int) -> bool:
    """True if a case that costs much runs in continuous integration on a commit of this part."""
    return crc32(name.encode()) % TURNS == part % TURNS


def chosen(cases: Mapping[str, Values], case_s: float, part: int) -> list[str]:
    """Choose the cases of one function that the quick tier runs.

    Args:
        cases: the values of the parameters of each, by name of case.
        case_s: what one is expected to cost, in seconds.
        part: 0 to 15.
    """
    if case_s * len(cases) < FREE_S:
        return list(cases)
    if case_s > CASE_S:
        return [case for case in cases if crc32(case.encode()) % PARTS == part]
    left = sorted(cases, key=lambda case: crc32(f"{part} {case}".encode()))
    found: list[str] = []
    seen: set[Values] = set()
    for _ in range(max(1, int(CASE_S / case_s))):
        if not left:
            break
        best = max(left, key=lambda case: len(pairs(cases[case]) - seen))
        left.remove(best)
        found.append(best)
        seen |= pairs(cases[best])
    return found


def pairs(values: Values) -> set[Values]:
    """All single values and all pairs of values."""
    return {frozenset(each) for size in (1, 2) for each in combinations(values, size)}
