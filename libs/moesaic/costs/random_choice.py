"""Experts whose weights a step reads, as a term of its cost that needs no routing to be known."""

import math
from typing import NamedTuple


class RandomChoice(NamedTuple):
    """A gate that chooses at random: each row ``top_k`` of ``num_experts`` unlike experts."""

    num_experts: int
    top_k: int

    def experts(self, rows: float) -> float:
        """Count the experts of one layer that so many rows choose, on average.

        The first rows add ``top_k`` each, later ones ever fewer, up to all there are.
        """
        return self.num_experts * (1.0 - math.pow(1.0 - self.top_k / self.num_experts, rows))
