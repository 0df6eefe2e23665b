"""Ways in which expert workers choose among the replicas of an expert."""

from typing import Literal, get_args

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

SCHEDULINGS: tuple[ExpertScheduling, ...] = get_args(ExpertScheduling)
"""The place of each is its code in frames: workers of other versions read it, so it never changes."""

BASELINES: tuple[ExpertScheduling, ...] = (
    "first",
    "metro",
    "random",
    "random-per-row",
    "token-balanced",
)
"""Ways that exist to be compared with: accepted everywhere, named by no help."""
