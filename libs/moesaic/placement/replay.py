"""What a placement would have meant for traffic that was seen: replay it, and choose.

What a memory-bound layer waits for is the fullest instance: the one that has most distinct
activated experts. AEBS makes that as small as the placement allows, so a placement is judged by it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import MoesaicError
from moesaic.placement.aebs import replica_table, schedule_experts
from moesaic.placement.policies import POLICIES
from moesaic.placement.problem import Problem
from moesaic.placement.stability import loads, settle
from moesaic.placement.uniform import Slots

Scheduling = Callable[[NDArray[np.bool_], NDArray[np.int32]], NDArray[np.int64]]


def aebs_counts(activated: NDArray[np.bool_], replicas: NDArray[np.int32]) -> NDArray[np.int64]:
    """Activated experts on each instance, int64 ``[N]``, as AEBS schedules one batch.

    Args:
        activated: bool ``[E]``. Memory-bound, who is active is all that counts.
        replicas: from ``replica_table``, ``[E, N]``.
    """
    return schedule_experts(np.flatnonzero(activated)[:, None], replicas).load


@dataclass(frozen=True)
class Replayed:
    """Activated experts of an instance, over all batches of all layers."""

    max_activated: float  # mean of the fullest instance's count
    spread: float  # mean of the fullest's less the emptiest's
    activated: float  # mean of how many experts are active at all
    batches: int


def replay(
    placed: Sequence[Slots],
    batches: Sequence[NDArray[np.bool_]],
    scheduling: Scheduling = aebs_counts,
) -> Replayed:
    """Schedule what was seen on a placement.

    Args:
        placed: ``[L][N][slots]``.
        batches: for each of the layers, the active experts of its batches, bool ``[B, E]``.
        scheduling: who serves, and so how many experts each instance has.
    """
    largest, smallest, active = [], [], []
    for slots, masks in zip(placed, batches, strict=True):
        replicas = replica_table(slots, masks.shape[1])
        for mask in masks:
            counts = scheduling(mask, replicas)
            largest.append(int(counts.max()))
            smallest.append(int(counts.min()))
            active.append(int(mask.sum()))
    if not largest:
        return Replayed(0.0, 0.0, 0.0, 0)
    fullest = float(np.mean(largest))
    return Replayed(
        fullest, fullest - float(np.mean(smallest)), float(np.mean(active)), len(largest)
    )


def _told_apart(problem: Problem) -> tuple[Problem, list[NDArray[np.bool_]]]:
    """The problem with every second sampled batch, and of each layer the others to replay."""
    seen = [replace(layer, sampled=layer.sampled[::2]) for layer in problem.traffic]
    others = [layer.sampled[1::2] for layer in problem.traffic]
    return replace(problem, traffic=tuple(seen)), others


@dataclass(frozen=True)
class Choice:
    """A placement to move to, and what that is expected to bring.

    Attributes:
        policy: who made it; empty: what is there should stay.
        slots: ``[L][N][slots]``, arranged so that little has to be loaded.
        before: of the current placement, on the same batches.
        after: of the chosen one.
        loads: replicas that have to be loaded.
        load_bytes: of their weights.
        tried: largest counts by policy; a policy that failed is in ``failed``.
        failed: why, by policy.
    """

    policy: str
    slots: list[Slots]
    before: Replayed
    after: Replayed
    loads: int
    load_bytes: int
    tried: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The share by which the largest count is expected to sink; negative if it would grow."""
        before = self.before.max_activated
        return 1 - self.after.max_activated / before if before > 0 else 0.0


def choose_policy(
    problem: Problem,
    current: Sequence[Slots],
    policies: Iterable[str] = ("eplb", "eplb-batches", "janus-batches"),
    alike: Sequence[object] | None = None,
) -> Choice:
    """Replay the recent batches on what each policy makes, and take the best.

    Every second of the sampled batches is for the policies to see, the others are replayed. Ties go
    to who has least to load, then to the first policy named. What is there now is among the
    candidates, and wins ties.

    Args:
        problem: its ``traffic`` brings the counts and the sampled batches. Both are of one time, so
            a prediction holds while traffic stays as it was.
        current: ``[L][N][slots]``, what is there now.
        policies: of ``POLICIES``.
        alike: which instances may exchange their experts; see ``settle``.
    """
    problem, batches = _told_apart(problem)
    before = replay(current, batches)
    chosen = Choice("", [list(layer) for layer in current], before, before, 0, 0)
    tried, failed = {}, {}
    for name in policies:
        try:
            wanted = settle(current, POLICIES[name](problem), alike)
        except MoesaicError as error:
            failed[name] = str(error)
            continue
        after, moved = replay(wanted, batches), loads(current, wanted)
        tried[name] = after.max_activated
        if (after.max_activated, moved) < (chosen.after.max_activated, chosen.loads):
            cost = moved * problem.expert_bytes
            chosen = Choice(name, wanted, before, after, moved, cost)
    return Choice(
        chosen.policy,
        chosen.slots,
        before,
        chosen.after,
        chosen.loads,
        chosen.load_bytes,
        tried,
        failed,
    )
