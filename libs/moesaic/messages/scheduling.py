"""Ways in which expert workers choose among the replicas of an expert."""

from typing import Literal

ExpertScheduling = Literal[
    "aebs",
    "aebs-memory-bound",
    "static",
    "first",
    "metro",
    "random",
    "random-per-row",
    "token-balanced",
]
"""``aebs``: so that the worker that has most has as little as can be, by the costs that workers have
measured; ``aebs-memory-bound``: the same where an expert costs 1, with any number of rows, as in the
paper; ``static``: by the placement alone, the same for every batch. The others are ``BASELINES``."""

CODES: dict[ExpertScheduling, int] = {
    "aebs": 0,
    "aebs-memory-bound": 1,
    "static": 2,
    "first": 3,
    "metro": 4,
    "random": 5,
    "random-per-row": 6,
    "token-balanced": 7,
}
"""Codes in frames: workers of other versions read them, so a code never changes."""

SCHEDULINGS: tuple[ExpertScheduling, ...] = tuple(CODES)

BASELINES: tuple[ExpertScheduling, ...] = (
    "first",
    "metro",
    "random",
    "random-per-row",
    "token-balanced",
)
"""Ways that exist to be compared with: accepted everywhere, named by no help."""
