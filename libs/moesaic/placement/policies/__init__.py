"""Which expert goes into which slot? Policies, by name and with one signature.

A policy takes a ``PlacementProblem`` and returns ``[L][N][slots]`` expert ids, -1 for an empty slot.
Every expert has a replica, no instance has an expert twice, and the same problem has the same
answer everywhere. A policy raises ``PlacementInfeasible`` if the slots cannot hold every expert,
and nothing else. Where instances have memory in place of slots, an instance's list is as long as
the room that the policy gave the layer, and all fits on its devices (``packing.pack_devices``).
"""

from moesaic.placement.policies.registry import (
    AUTO,
    KEEP,
    POLICIES,
    Policy,
    make_placement,
    require_policy,
)

__all__ = ["AUTO", "KEEP", "POLICIES", "Policy", "make_placement", "require_policy"]
