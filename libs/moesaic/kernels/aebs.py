"""Activated-expert-balanced scheduling on tensors; ``moesaic.placement.schedule.aebs`` says what it decides.

On a CPU one call decides; on a GPU one kernel does, or three for many choices.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from moesaic.native import library
from moesaic.placement.schedule import aebs
from moesaic.placement.schedule.aebs import NONE, Costs, Schedule

EVERY_REPLICA = (0, 2**31 - 1)


def schedule_experts(
    topk_ids: Tensor,
    replicas: Tensor,
    live: Tensor,
    load: Tensor,
    costs: Costs[Tensor],
    window: tuple[int, int] = EVERY_REPLICA,
) -> Schedule[Tensor]:
    """Decide as ``moesaic.placement.schedule.aebs.schedule_experts``, to the last integer; on a GPU without waiting.

    Args:
        topk_ids: int32 or int64, ``[T, k]``, contiguous; an id outside ``0..E-1`` chooses nothing.
        replicas: int32 ``[E, N]``, contiguous: physical replica ids, -1 where there is none.
        live: bool ``[N]``.
        load: int64 ``[N]``, the work that each has left. Not changed.
        costs: int64 ``[N]`` each.
        window: ``(first, end)``; then ``replica_of_choice`` counts from ``first``, and is -1 for
            replicas outside: with those of one instance, its slots.
    """
    if topk_ids.is_cuda:
        from moesaic.kernels.triton import aebs as kernel

        return kernel.schedule_experts(topk_ids, replicas, live, load, costs, window)
    if library.library() is None:
        return _within(_in_numpy(topk_ids, replicas, live, load, costs), window)
    return _on_a_cpu(topk_ids, replicas, live, load, costs, window)


def _on_a_cpu(
    topk_ids: Tensor,
    replicas: Tensor,
    live: Tensor,
    load: Tensor,
    costs: Costs[Tensor],
    window: tuple[int, int],
) -> Schedule[Tensor]:
    lib = library.lib()
    num_experts, num_instances = replicas.shape
    if topk_ids.dtype != torch.int32:
        topk_ids = topk_ids.clamp(-1, num_experts).int()
    load = load.clone()
    instance = torch.empty(num_experts, dtype=torch.int32)
    replica = torch.empty(num_experts, dtype=torch.int32)
    of_choice = torch.empty(topk_ids.shape, dtype=torch.int32)
    lib.schedule_experts(
        ids=topk_ids.data_ptr(),
        count=topk_ids.numel(),
        replicas=replicas.data_ptr(),
        num_experts=num_experts,
        num_instances=num_instances,
        live=live.data_ptr(),
        weights=costs.weights.data_ptr(),
        row=costs.row.data_ptr(),
        load=load.data_ptr(),
        first=window[0],
        end=window[1],
        instance=instance.data_ptr(),
        replica=replica.data_ptr(),
        of_choice=of_choice.data_ptr(),
        scratch=library.scratch(_scratch_bytes(num_experts, num_instances)),
    )
    return Schedule(replica, instance, load, of_choice)


@cache
def _scratch_bytes(num_experts: int, num_instances: int) -> int:
    needed = library.lib().schedule_experts_scratch(
        num_experts=num_experts, num_instances=num_instances
    )
    return int(needed)


def _in_numpy(
    topk_ids: Tensor, replicas: Tensor, live: Tensor, load: Tensor, costs: Costs[Tensor]
) -> Schedule[Tensor]:
    decided = aebs.schedule_experts(
        topk_ids.numpy(),
        replicas.numpy(),
        live=live.numpy(),
        load=load.numpy(),
        costs=Costs(costs.weights.numpy(), costs.row.numpy()),
    )
    arrays = decided.replica, decided.instance, decided.load, decided.replica_of_choice
    return Schedule(*map(torch.from_numpy, arrays))


def _within(schedule: Schedule[Tensor], window: tuple[int, int]) -> Schedule[Tensor]:
    """Count the replicas of choices from the ``window``'s first; -1 for those outside."""
    if window == EVERY_REPLICA:
        return schedule
    first, end = window
    of_choice = schedule.replica_of_choice
    inside = (of_choice >= first) & (of_choice < end)
    return replace(schedule, replica_of_choice=torch.where(inside, of_choice - first, NONE))
