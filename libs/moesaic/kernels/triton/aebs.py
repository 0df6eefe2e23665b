# AEBS: which replica serves each activated expert, and so each choice.
#   Grid       tokens, choices: (cdiv(T * k, CHUNK),); assign: (1,), one warp.
#   Layout     topk_ids [T * k], replicas [E, N] row-major; all of E or of N in registers at a time.
#   Cost       latency-bound: experts with one live replica are added up N instances in a row, those
#              with several are assigned one after another; then one search, as wide as E x N, for
#              each way on which the largest load can be lowered, and one that finds none. Three
#              launches; the host is never asked.
#   Order      integers only. Counts are added with atomics, which for integers leaves nothing open;
#              every tie goes to the lowest id.
#   Reference  moesaic.placement.schedule.aebs.schedule_experts, in numpy; equal to the last integer.
"""Activated-expert-balanced scheduling in three kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.placement.schedule.aebs import Costs, Schedule

_CHUNK = 1024  # choices a program counts or maps
_TILE = 1024  # replicas looked at together: what one warp holds in registers


@triton.jit(do_not_specialize=["num_choices"])
def _tokens_kernel(topk_ids, counts, num_choices, num_experts, CHUNK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(topk_ids + choice, mask=choice < num_choices, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    tl.atomic_add(counts + tl.where(real, expert, 0), 1, mask=real, sem="relaxed")


@triton.jit
def _improved(
    replicas,
    replica,
    instance,
    loads,
    is_live,
    price,
    num_experts,
    num_instances,
    EXPERTS_POW2: tl.constexpr,
    INSTANCES_POW2: tl.constexpr,
    PART: tl.constexpr,
):
    """Move experts, each of them to make room for the next, until the largest load is the least."""
    LARGEST: tl.constexpr = 2**31 - 1
    column = tl.arange(0, INSTANCES_POW2)
    improving = True
    while improving:
        # What was stored is loaded again, by other threads.
        tl.debug_barrier()
        highest = tl.max(tl.where(is_live, loads, -1), axis=0)
        start = tl.min(tl.where(is_live & (loads == highest), column, LARGEST), axis=0)
        reached = (column == start).to(tl.int32)
        # Which expert would move here.
        came = tl.zeros((INSTANCES_POW2,), tl.int32)
        target = start
        growing = True
        while growing:
            found = tl.full((INSTANCES_POW2,), LARGEST, tl.int32)
            for first in range(0, EXPERTS_POW2, PART):
                part = first + tl.arange(0, PART)
                at = tl.load(instance + part, mask=part < num_experts, other=-1)
                on_reached = tl.max(
                    tl.where(at[:, None] == column[None, :], reached[None, :], 0), axis=1
                )
                held = tl.load(
                    replicas + part[:, None] * num_instances + column[None, :],
                    mask=(part < num_experts)[:, None] & is_live[None, :],
                    other=-1,
                )
                takes = (held >= 0) & (on_reached[:, None] > 0)
                lowest = tl.min(tl.where(takes, part[:, None], LARGEST), axis=0)
                found = tl.minimum(found, lowest)
            new = (found < LARGEST) & (reached == 0)
            came = tl.where(new, found, came)
            reached = tl.where(new, 1, reached)
            room = (reached > 0) & (loads + price < highest)
            least = tl.min(tl.where(room, loads, highest), axis=0)
            target = tl.min(tl.where(room & (loads == least), column, LARGEST), axis=0)
            growing = (target == LARGEST) & (tl.max(new.to(tl.int32), axis=0) > 0)
        improving = target != LARGEST
        if improving:
            loads += tl.where(column == target, price, 0) - tl.where(column == start, price, 0)
            while target != start:
                moved = tl.sum(tl.where(column == target, came, 0), axis=0)
                source = tl.load(instance + moved)
                physical = tl.load(replicas + moved * num_instances + target)
                # Every thread has read it.
                tl.debug_barrier()
                tl.store(instance + moved, target)
                tl.store(replica + moved, physical)
                target = source
    return loads


# Another placement may have one instance or sixteen: each kind of number would be compiled anew.
@triton.jit(do_not_specialize=["num_instances"])
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
    PART: tl.constexpr,
):
    LARGEST: tl.constexpr = 2**31 - 1
    expert = tl.arange(0, EXPERTS_POW2)
    real = expert < num_experts
    tokens = tl.load(counts + expert, mask=real, other=0).to(tl.int64)
    activated = tokens > 0
    num_replicas = tl.zeros((EXPERTS_POW2,), tl.int32)
    # The last; where there is one, the only one.
    holder = tl.zeros((EXPERTS_POW2,), tl.int32)
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
    free = activated & (num_replicas > 1)
    # Of experts that have a choice.
    lowest_price = tl.full((), 2**63 - 1, tl.int64)
    highest_price = tl.full((), -1, tl.int64)
    for n in range(num_instances):
        cost = tl.maximum(tokens * tl.load(row_costs + n), tl.load(weight_costs + n))
        held = tl.load(replicas + expert * num_instances + n, mask=free, other=-1)
        priced = (held >= 0) & (tl.load(live + n).to(tl.int32) != 0)
        lowest_price = tl.minimum(lowest_price, tl.min(tl.where(priced, cost, 2**63 - 1), axis=0))
        highest_price = tl.maximum(highest_price, tl.max(tl.where(priced, cost, -1), axis=0))
        added = tl.sum(tl.where(bound & (holder == n), cost, 0), axis=0)
        loads = tl.where(column == n, loads + added, loads)
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

    if (lowest_price == highest_price) & (highest_price > 0):
        loads = _improved(
            replicas,
            replica,
            instance,
            loads,
            is_live,
            highest_price,
            num_experts,
            num_instances,
            EXPERTS_POW2,
            INSTANCES_POW2,
            PART,
        )
    tl.store(load + column, loads, mask=column < num_instances)


@triton.jit(do_not_specialize=["num_choices"])
def _choices_kernel(
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
    experts_pow2 = triton.next_power_of_2(num_experts)
    instances_pow2 = triton.next_power_of_2(num_instances)
    grid = (triton.cdiv(num_choices, _CHUNK),)
    if num_choices:
        _tokens_kernel[grid](topk_ids, counts, num_choices, num_experts, CHUNK=_CHUNK)
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
        EXPERTS_POW2=experts_pow2,
        INSTANCES_POW2=instances_pow2,
        PART=min(experts_pow2, max(1, _TILE // instances_pow2)),
        num_warps=1,
    )
    if num_choices:
        _choices_kernel[grid](
            topk_ids,
            schedule.replica,
            schedule.replica_of_choice,
            num_choices,
            num_experts,
            CHUNK=_CHUNK,
        )
    return schedule
