"""How expert workers choose among the replicas of an expert."""

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
"""``aebs``: so that the worker that has most has as little as can be, by what workers have measured
that experts cost; ``aebs-memory-bound``: the same where an expert costs 1, whatever its rows, as in
the paper; ``static``: by the placement alone, whatever the batch. The others are to compare with."""

POLICIES: tuple[ExpertScheduling, ...] = get_args(ExpertScheduling)
"""All of them; a policy's place is its code in frames."""
