"""The substitution: what serves degraded choices under brownout."""

from typing import Annotated, Literal

import msgspec

Instead = Literal["united", "fewer", "nothing"]
"""What serves a degraded choice: its group's united expert; the row's other experts, with weights that
have the same sum; or nobody (the paper's full brownout)."""

Rule = Literal["tokens", "instances"]
"""Experts stay by how many rows chose them; or so that no worker has many more of them to compute than another."""

MOST_WAY = 64


class Substitution(msgspec.Struct, frozen=True, kw_only=True):
    """The replacement for degraded choices, the same for all layers and all workers of a placement.

    Attributes:
        way: experts of one group; 0: there are no united experts.
        instead: serves a degraded choice.
        rule: decides which experts stay.
    """

    way: Annotated[int, msgspec.Meta(ge=0, le=MOST_WAY)] = 0
    instead: Instead = "nothing"
    rule: Rule = "tokens"

    def num_united(self, num_experts: int) -> int:
        """Count the united experts of a layer; the last group may be smaller."""
        return -(-num_experts // self.way) if self.way else 0

    def weights_id(self, expert: int, num_experts: int) -> int:
        """Name an expert of a placement by its weights, which mean the same under every substitution.

        Args:
            expert: ``0..E-1``, ``E + j`` for united expert ``j``, or -1, which stays.
            num_experts: experts of a layer, without united ones: E.
        """
        return expert if expert < num_experts else self.way * num_experts + expert - num_experts
