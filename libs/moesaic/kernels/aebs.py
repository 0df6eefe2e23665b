"""Activated-expert-balanced scheduling on tensors; ``moesaic.placement.aebs`` says what it decides."""

import torch
from torch import Tensor

from moesaic.placement.aebs import NONE, UNAVAILABLE, Costs, Schedule


def schedule_experts(
    topk_ids: Tensor, replicas: Tensor, live: Tensor, load: Tensor, costs: Costs[Tensor]
) -> Schedule[Tensor]:
    """As ``moesaic.placement.aebs.schedule_experts``, to the last integer; on a GPU without waiting.

    Args:
        topk_ids: int32 or int64, ``[T, k]``, contiguous; an id outside ``0..E-1`` chooses nothing.
        replicas: int32 ``[E, N]``, contiguous: physical replica ids, -1 where there is none.
        live: bool ``[N]``.
        load: int64 ``[N]``, what each still has to do. Not changed.
        costs: int64 ``[N]`` each.
    """
    if topk_ids.is_cuda:
        from moesaic.kernels import aebs_triton as kernel

        return kernel.schedule_experts(topk_ids, replicas, live, load, costs)
    return schedule_experts_reference(topk_ids, replicas, live, load, costs)


def schedule_experts_reference(
    topk_ids: Tensor, replicas: Tensor, live: Tensor, load: Tensor, costs: Costs[Tensor]
) -> Schedule[Tensor]:
    """As ``schedule_experts``, in torch's own operations, one expert at a time."""
    num_experts = replicas.shape[0]
    real = (topk_ids >= 0) & (topk_ids < num_experts)
    tokens = torch.bincount(topk_ids[real], minlength=num_experts)  # [E]
    held = (replicas >= 0) & live  # [E, N]
    num_replicas = held.sum(dim=1)
    instance = torch.where(tokens > 0, UNAVAILABLE, NONE).int()
    replica = torch.full_like(instance, NONE)
    load = load.clone()
    waiting = torch.where((tokens > 0) & (num_replicas > 0))[0]
    for expert in waiting[num_replicas[waiting].sort(stable=True).indices]:
        with_it = load + torch.maximum(costs.weights, tokens[expert] * costs.row)
        holders = held[expert].nonzero().flatten()
        # The first of the least: torch's argmin leaves open which it is.
        chosen = holders[(with_it[holders] == with_it[holders].min()).nonzero()[0, 0]]
        load[chosen] = with_it[chosen]
        instance[expert], replica[expert] = chosen, replicas[expert, chosen]
    of_choice = torch.full(topk_ids.shape, NONE, dtype=torch.int32, device=topk_ids.device)
    of_choice[real] = replica[topk_ids[real].long()]
    return Schedule(replica, instance, load, of_choice)
