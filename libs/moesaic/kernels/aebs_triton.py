# AEBS: which replica serves each activated expert, and so each choice.
#   Grid       count, map: (cdiv(T * k, CHUNK),); assign: (1,), one warp.
#   Layout     topk_ids [T * k], replicas [E, N] row-major; all of E or of N in registers at a time.
#   Cost       latency-bound: experts with one live replica are added up N instances in a row, those
#              with several are assigned one after another. Three launches; the host is never asked.
#   Order      integers only. Counts are added with atomics, which for integers leaves nothing open;
#              every tie goes to the lowest id.
#   Reference  moesaic.kernels.aebs.schedule_experts_reference; equal to the last integer.
"""Activated-expert-balanced scheduling in three kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.placement.aebs import Costs, Schedule

_CHUNK = 1024  # choices a program counts or maps


@triton.jit(do_not_specialize=["num_choices"])
def _count_kernel(topk_ids, counts, num_choices, num_experts, CHUNK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + choice, mask=choice < num_choices, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    tl.atomic_add(counts + tl.where(real, expert, 0), 1, mask=real, sem="relaxed")


@triton.jit
def _assign_kernel(
    counts,
    replicas,
    live,
    carried,
    weight_costs,
    row_costs,
    replica,
    instance,
    load,
    num_experts,
    num_instances,
    EXPERTS_POW2: tl.constexpr,
    INSTANCES_POW2: tl.constexpr,
):
    LARGEST: tl.constexpr = 2**31 - 1
    expert = tl.arange(0, EXPERTS_POW2)
    real = expert < num_experts
    tokens = tl.load(counts + expert, mask=real, other=0).to(tl.int64)
    activated = tokens > 0
    num_replicas = tl.zeros((EXPERTS_POW2,), tl.int32)
    holder = tl.zeros((EXPERTS_POW2,), tl.int32)  # the last; where there is one, the only one
    for n in range(num_instances):
        held = tl.load(replicas + expert * num_instances + n, mask=real, other=-1)
        here = (held >= 0) & (tl.load(live + n).to(tl.int32) != 0)
        num_replicas += here.to(tl.int32)
        holder = tl.where(here, n, holder)

    column = tl.arange(0, INSTANCES_POW2)
    is_live = tl.load(live + column, mask=column < num_instances, other=0).to(tl.int32) != 0
    loads = tl.load(carried + column, mask=column < num_instances, other=0)
    weights = tl.load(weight_costs + column, mask=column < num_instances, other=0)
    rows = tl.load(row_costs + column, mask=column < num_instances, other=0)

    bound = activated & (num_replicas == 1)
    for n in range(num_instances):
        cost = tl.maximum(tokens * tl.load(row_costs + n), tl.load(weight_costs + n))
        added = tl.sum(tl.where(bound & (holder == n), cost, 0), axis=0)
        loads = tl.where(column == n, loads + added, loads)
    free = activated & (num_replicas > 1)
    unserved = tl.where(activated & (num_replicas == 0), -2, -1)
    only = tl.load(replicas + expert * num_instances + holder, mask=bound, other=-1)
    # Those that are free are stored below, and only there: two threads would race for them.
    tl.store(instance + expert, tl.where(bound, holder, unserved), mask=real & ~free)
    tl.store(replica + expert, only, mask=real & ~free)

    turn = tl.where(free, num_replicas * EXPERTS_POW2 + expert, LARGEST)
    for _ in range(tl.sum(free.to(tl.int32), axis=0)):
        now = tl.min(turn, axis=0) % EXPERTS_POW2
        turn = tl.where(expert == now, LARGEST, turn)
        held = tl.load(replicas + now * num_instances + column, mask=is_live, other=-1)
        cost = tl.maximum(tl.load(counts + now).to(tl.int64) * rows, weights)
        with_it = tl.where(held >= 0, loads + cost, 2**63 - 1)
        least = tl.min(with_it, axis=0)
        chosen = tl.min(tl.where((with_it == least) & (held >= 0), column, INSTANCES_POW2), axis=0)
        loads = tl.where(column == chosen, with_it, loads)
        tl.store(instance + now, chosen)
        tl.store(replica + now, tl.load(replicas + now * num_instances + chosen))
    tl.store(load + column, loads, mask=column < num_instances)


@triton.jit(do_not_specialize=["num_choices"])
def _map_kernel(
    topk_ids, replica, replica_of_choice, num_choices, num_experts, CHUNK: tl.constexpr
):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + choice, mask=choice < num_choices, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    served = tl.load(replica + tl.where(real, expert, 0), mask=real, other=-1)
    tl.store(replica_of_choice + choice, served, mask=choice < num_choices)


def schedule_experts(
    topk_ids: Tensor, replicas: Tensor, live: Tensor, load: Tensor, costs: Costs[Tensor]
) -> Schedule[Tensor]:
    """See ``moesaic.kernels.aebs.schedule_experts``."""
    num_experts, num_instances = replicas.shape
    num_choices = topk_ids.numel()
    assert topk_ids.is_contiguous()
    assert replicas.is_contiguous()
    counts = replicas.new_zeros(num_experts)
    schedule = Schedule(
        replica=torch.empty_like(counts),
        instance=torch.empty_like(counts),
        load=torch.empty_like(load),
        replica_of_choice=replicas.new_empty(topk_ids.shape),
    )
    grid = (triton.cdiv(num_choices, _CHUNK),)
    if num_choices:
        _count_kernel[grid](topk_ids, counts, num_choices, num_experts, CHUNK=_CHUNK)
    _assign_kernel[(1,)](
        counts,
        replicas,
        live,
        load,
        costs.weights,
        costs.row,
        schedule.replica,
        schedule.instance,
        schedule.load,
        num_experts,
        num_instances,
        EXPERTS_POW2=triton.next_power_of_2(num_experts),
        INSTANCES_POW2=triton.next_power_of_2(num_instances),
        num_warps=1,
    )
    if num_choices:
        _map_kernel[grid](
            topk_ids,
            schedule.replica,
            schedule.replica_of_choice,
            num_choices,
            num_experts,
            CHUNK=_CHUNK,
        )
    return schedule
