"""Activated-expert-balanced scheduling on tensors; ``moesaic.placement.schedule.aebs`` says what it decides.

On a CPU one call decides; on a GPU three kernels do.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from moesaic.native import library
from moesaic.placement.schedule import aebs
from moesaic.placement.schedule.aebs import NONE, UNAVAILABLE, Costs, Schedule

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

        schedule = kernel.schedule_experts(topk_ids, replicas, live, load, costs)
        return within(schedule, window)
    if library.library() is None:
        return within(_in_numpy(topk_ids, replicas, live, load, costs), window)
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


def within(schedule: Schedule[Tensor], window: tuple[int, int]) -> Schedule[Tensor]:
    """Count the replicas of choices from the ``window``'s first; -1 for those outside."""
    if window == EVERY_REPLICA:
        return schedule
    first, end = window
    of_choice = schedule.replica_of_choice
    inside = (of_choice >= first) & (of_choice < end)
    return replace(schedule, replica_of_choice=torch.where(inside, of_choice - first, NONE))


def schedule_experts_reference(
    topk_ids: Tensor, replicas: Tensor, live: Tensor, load: Tensor, costs: Costs[Tensor]
) -> Schedule[Tensor]:
    """Decide as ``schedule_experts``, in torch's own operations, one expert at a time."""
    num_experts = replicas.shape[0]
    real = (topk_ids >= 0) & (topk_ids < num_experts)
    tokens = torch.bincount(topk_ids[real], minlength=num_experts)  # [E]
    held = (replicas >= 0) & live  # [E, N]
    num_replicas = held.sum(dim=1)
    instance = torch.where(tokens > 0, UNAVAILABLE, NONE).int()
    load = load.clone()
    price = torch.maximum(costs.weights, tokens[:, None] * costs.row)  # [E, N]
    waiting = torch.where((tokens > 0) & (num_replicas > 0))[0]
    for expert in waiting[num_replicas[waiting].sort(stable=True).indices]:
        with_it = load + price[expert]
        holders = held[expert].nonzero().flatten()
        # The first of the least: torch's argmin leaves open which it is.
        chosen = holders[(with_it[holders] == with_it[holders].min()).nonzero()[0, 0]]
        load[chosen] = with_it[chosen]
        instance[expert] = chosen
    prices = price[held & ((tokens > 0) & (num_replicas > 1))[:, None]]
    if len(prices) and prices.min() == prices.max() and prices[0] > 0:
        while _improved(instance, load, held, live, prices[0]):
            pass
    replica = torch.full_like(instance, NONE)
    served = (instance >= 0).nonzero().flatten()
    replica[served] = replicas[served, instance[served].long()]
    of_choice = torch.full(topk_ids.shape, NONE, dtype=torch.int32, device=topk_ids.device)
    of_choice[real] = replica[topk_ids[real].long()]
    return Schedule(replica, instance, load, of_choice)


def _improved(instance: Tensor, load: Tensor, held: Tensor, live: Tensor, price: Tensor) -> bool:
    """Move experts, in place, so that one instance with the largest load has less.

    Returns:
        False if no move does that.
    """
    num_experts = held.shape[0]
    highest = load[live].max()
    start = int((live & (load == highest)).nonzero()[0, 0])
    reached = torch.zeros_like(load, dtype=torch.bool)
    reached[start] = True
    came = torch.full_like(load, NONE)
    lowest_id = torch.arange(num_experts, device=load.device)[:, None]
    while True:
        on_reached = (instance >= 0) & reached[instance.clamp(min=0).long()]
        takers = held & on_reached[:, None]
        found = torch.where(takers, lowest_id, num_experts).amin(dim=0)  # [N]
        new = (found < num_experts) & ~reached
        came = torch.where(new, found, came)
        reached = reached | new
        room = (reached & (load + price < highest)).nonzero().flatten()
        if len(room) or not bool(new.any()):
            break
    if not len(room):
        return False
    target = int(room[(load[room] == load[room].min()).nonzero()[0, 0]])
    load[target] += price
    load[start] -= price
    while target != start:
        expert = int(came[target])
        source = int(instance[expert])
        instance[expert] = target
        target = source
    return True
