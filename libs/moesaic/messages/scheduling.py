"""How expert workers choose among the replicas of an expert."""

from typing import Literal, get_args

ExpertScheduling = Literal[
    "aebs", "static", "first", "metro", "random", "random-per-row", "token-balanced"
]
"""``aebs``: so that the largest number of activated experts is the least; ``static``: by the
placement alone, whatever the rows; the others are what these are compared with."""

POLICIES: tuple[ExpertScheduling, ...] = get_args(ExpertScheduling)
"""All of them; a policy's place is its code in frames."""
