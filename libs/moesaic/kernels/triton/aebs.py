# AEBS: which replica serves each activated expert, and so each choice.
#   Grid       tokens, choices: (cdiv(T * k, CHUNK),); assign: (1,), eight warps.
#   Layout     topk_ids [T * k], replicas [E, N] row-major; a part of E x N in registers at a time.
#   Cost       latency-bound. Counts, prices, the experts without a choice and the order of the others
#              are found by all warps at once. Turns follow one another: each is one reduction over
#              N, and its loads begin a turn before. Then one search, as wide as E x N, for each way
#              on which the largest load can be lowered, and one that finds none. One launch for few
#              choices, else three; the host is never asked.
#   Order      integers only. Counts are added with atomics, which for integers leaves nothing open;
#              every tie goes to the lowest id.
#   Reference  moesaic.placement.schedule.aebs.schedule_experts, in numpy; equal to the last integer.
"""Activated-expert-balanced scheduling in one kernel, or in three for many choices."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.aebs import EVERY_REPLICA
from moesaic.placement.schedule.aebs import Costs, Schedule

_CHUNK = 1024  # choices a program counts or maps
_FEW_CHOICES = 4096  # one program also counts and maps so many: that takes less time than launches
_TILE = 4096  # replicas looked at together: what eight warps hold in registers
SIDE = tl.constexpr(16)  # experts that all others are compared with together


@triton.jit
def _count_choices(topk_ids, counts, choice, num_choices, num_experts):
    """Count some choices of each expert."""
    expert = tl.load(topk_ids + choice, mask=choice < num_choices, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    tl.atomic_add(counts + tl.where(real, expert, 0), 1, mask=real, sem="relaxed")


@triton.jit
def _map_choices(
    topk_ids,
    replica,
    replica_of_choice,
    choice,
    num_choices,
    num_experts,
    first_replica,
    end_replica,
):
    """Store the replicas of some choices, counted from ``first_replica``; -1 past the end, too."""
    expert = tl.load(topk_ids + choice, mask=choice < num_choices, other=-1)
    real = (expert >= 0) & (expert < num_experts)
    served = tl.load(replica + tl.where(real, expert, 0), mask=real, other=-1)
    inside = (served >= first_replica) & (served < end_replica)
    served = tl.where(inside, served - first_replica, -1)
    tl.store(replica_of_choice + choice, served, mask=choice < num_choices)


@triton.jit(do_not_specialize=["num_choices"])
def _tokens_kernel(topk_ids, counts, num_choices, num_experts, CHUNK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    _count_choices(topk_ids, counts, choice, num_choices, num_experts)


@triton.jit
def _improved(
    replicas,
    replica,
    instance,
    loads,
    column,
    is_live,
    price,
    num_experts,
    num_instances,
    EXPERTS_POW2: tl.constexpr,
    PART: tl.constexpr,
):
    """Move experts, each of them to make room for the next, until the largest load is the least."""
    LARGEST: tl.constexpr = 2**31 - 1
    improving = True
    while improving:
        # What was stored is loaded again, by other threads.
        tl.debug_barrier()
        highest = tl.max(tl.where(is_live, loads, -1), axis=0)
        start = tl.min(tl.where(is_live & (loads == highest), column, LARGEST), axis=0)
        reached = (column == start).to(tl.int32)
        # Which expert would move here.
        came = column * 0
        target = start
        growing = True
        while growing:
            found = column * 0 + LARGEST
            for first in range(0, EXPERTS_POW2, PART):
                part = first + tl.arange(0, PART)
                at = tl.load(instance + part, mask=part < num_experts, other=-1)
                on_reached = tl.max(
                    tl.where(at[:, None] == column[None, :], reached[None, :], 0), axis=1
                )
                held = _held(replicas, part, column, is_live, num_experts, num_instances)
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


@triton.jit
def _held(replicas, part, column, is_live, num_experts, num_instances):
    """Load the live replicas of a part of the experts, -1 where there is none."""
    return tl.load(
        replicas + part[:, None] * num_instances + column[None, :],
        mask=(part < num_experts)[:, None] & is_live[None, :],
        other=-1,
    )


@triton.jit
def _take_turns(
    counts,
    replicas,
    order,
    num_turns,
    replica,
    instance,
    loads,
    column,
    is_live,
    weights,
    rows,
    num_instances,
    INSTANCES_POW2: tl.constexpr,
):
    """Assign the experts of ``order`` one after another, each where the load with it is least.

    Loads of 32 bits leave room for the instance behind them: one reduction then finds both.
    """
    LARGEST: tl.constexpr = 2**63 - 1 if loads.dtype == tl.int64 else 2**31 - 1
    # Loads of the next turn begin before this one ends.
    expert = tl.load(order)
    held = tl.load(replicas + expert * num_instances + column, mask=is_live, other=-1)
    tokens = tl.load(counts + expert).to(loads.dtype)
    following = tl.load(order + 1)
    for turn in range(num_turns):
        next_held = tl.load(replicas + following * num_instances + column, mask=is_live, other=-1)
        next_tokens = tl.load(counts + following).to(loads.dtype)
        then = tl.load(order + turn + 2)
        with_it = loads + tl.maximum(tokens * rows, weights)
        if loads.dtype == tl.int64:
            with_it = tl.where(held >= 0, with_it, LARGEST)
            least = tl.min(with_it, axis=0)
            chosen = tl.min(
                tl.where((with_it == least) & (held >= 0), column, INSTANCES_POW2), axis=0
            )
        else:
            key = tl.where(held >= 0, with_it * INSTANCES_POW2 + column, LARGEST)
            least_key = tl.min(key, axis=0)
            least, chosen = least_key // INSTANCES_POW2, least_key % INSTANCES_POW2
        loads = tl.where(column == chosen, least, loads)
        tl.store(instance + expert, chosen)
        tl.store(replica + expert, tl.sum(tl.where(column == chosen, held, 0), axis=0))
        expert, held, tokens, following = following, next_held, next_tokens, then
    return loads


# Another placement may have one instance or sixteen: each kind of number would be compiled anew.
@triton.jit(do_not_specialize=["num_choices", "num_instances", "first_replica", "end_replica"])
def _assign_kernel(
    topk_ids,
    counts,
    replicas,
    live,
    carried,
    weight_costs,
    row_costs,
    keys,
    order,
    replica,
    instance,
    load,
    replica_of_choice,
    num_choices,
    num_experts,
    num_instances,
    first_replica,
    end_replica,
    EXPERTS_POW2: tl.constexpr,
    INSTANCES_POW2: tl.constexpr,
    PART: tl.constexpr,
    ALONE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    LARGEST: tl.constexpr = 2**31 - 1
    expert = tl.arange(0, EXPERTS_POW2)
    if ALONE:
        tl.store(counts + expert, 0, mask=expert < num_experts)
        tl.debug_barrier()
        for first in range(0, num_choices, CHUNK):
            choice = first + tl.arange(0, CHUNK)
            _count_choices(topk_ids, counts, choice, num_choices, num_experts)
        # What was stored is loaded again, by other threads.
        tl.debug_barrier()

    column = tl.arange(0, INSTANCES_POW2)
    is_instance = column < num_instances
    is_live = tl.load(live + column, mask=is_instance, other=0).to(tl.int32) != 0
    loads = tl.load(carried + column, mask=is_instance, other=0)
    weights = tl.load(weight_costs + column, mask=is_instance, other=0)
    rows = tl.load(row_costs + column, mask=is_instance, other=0)

    # Of experts that have a choice.
    lowest_price = tl.full((), 2**63 - 1, tl.int64)
    highest_price = tl.full((), -1, tl.int64)
    num_turns = 0
    most = tl.max(loads, axis=0)
    for first in range(0, EXPERTS_POW2, PART):
        part = first + tl.arange(0, PART)
        real = part < num_experts
        tokens = tl.load(counts + part, mask=real, other=0).to(tl.int64)
        held = _held(replicas, part, column, is_live, num_experts, num_instances)
        here = (held >= 0) & (tokens > 0)[:, None]
        num_replicas = tl.sum(here.to(tl.int32), axis=1)
        free = num_replicas > 1
        price = tl.maximum(tokens[:, None] * rows[None, :], weights[None, :])
        lowest_price = tl.minimum(
            lowest_price, tl.min(tl.where(here & free[:, None], price, 2**63 - 1))
        )
        highest_price = tl.maximum(highest_price, tl.max(tl.where(here & free[:, None], price, -1)))
        most += tl.sum(tl.max(tl.where(here, price, 0), axis=1), axis=0)
        bound = here & (num_replicas == 1)[:, None]
        loads += tl.sum(tl.where(bound, price, 0), axis=0)
        # Those that are free are stored below, and only there: two threads would race for them.
        none = tl.where(tokens > 0, -2, -1)
        holder = tl.max(tl.where(bound, column[None, :], none[:, None]), axis=1)
        tl.store(instance + part, holder, mask=real & ~free)
        only = tl.max(tl.where(bound, held, -1), axis=1)
        tl.store(replica + part, only, mask=real & ~free)
        tl.store(keys + part, tl.where(free, num_replicas * EXPERTS_POW2 + part, LARGEST))
        num_turns += tl.sum(free.to(tl.int32), axis=0)

    tl.debug_barrier()
    key = tl.load(keys + expert)
    before = tl.zeros((EXPERTS_POW2, SIDE), tl.int32)
    for first in range(0, EXPERTS_POW2, SIDE):
        other = tl.load(keys + first + tl.arange(0, SIDE))
        before += (other[None, :] < key[:, None]).to(tl.int32)
    # Behind the last turn, any expert is read in vain.
    tl.store(order + num_turns + tl.arange(0, 2), 0)
    tl.store(order + tl.sum(before, axis=1), expert, mask=key < LARGEST)
    tl.debug_barrier()

    if most < LARGEST // INSTANCES_POW2:
        loads = _take_turns(
            counts, replicas, order, num_turns, replica, instance, loads.to(tl.int32), column,
            is_live, weights.to(tl.int32), rows.to(tl.int32), num_instances, INSTANCES_POW2,
        ).to(tl.int64)  # fmt: skip
    else:
        loads = _take_turns(
            counts, replicas, order, num_turns, replica, instance, loads, column,
            is_live, weights, rows, num_instances, INSTANCES_POW2,
        )  # fmt: skip

    if (lowest_price == highest_price) & (highest_price > 0):
        loads = _improved(
            replicas,
            replica,
            instance,
            loads,
            column,
            is_live,
            highest_price,
            num_experts,
            num_instances,
            EXPERTS_POW2,
            PART,
        )
    tl.store(load + column, loads, mask=is_instance)
    if ALONE:
        tl.debug_barrier()
        for first in range(0, num_choices, CHUNK):
            choice = first + tl.arange(0, CHUNK)
            _map_choices(
                topk_ids, replica, replica_of_choice, choice, num_choices, num_experts,
                first_replica, end_replica,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_choices", "first_replica", "end_replica"])
def _choices_kernel(
    topk_ids,
    replica,
    replica_of_choice,
    num_choices,
    num_experts,
    first_replica,
    end_replica,
    CHUNK: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    _map_choices(
        topk_ids, replica, replica_of_choice, choice, num_choices, num_experts,
        first_replica, end_replica,
    )  # fmt: skip


def schedule_experts(
    topk_ids: Tensor,
    replicas: Tensor,
    live: Tensor,
    load: Tensor,
    costs: Costs[Tensor],
    window: tuple[int, int] = EVERY_REPLICA,
) -> Schedule[Tensor]:
    """See ``moesaic.kernels.aebs.schedule_experts``."""
    num_experts, num_instances = replicas.shape
    num_choices = topk_ids.numel()
    assert topk_ids.is_contiguous()
    assert replicas.is_contiguous()
    alone = num_choices <= _FEW_CHOICES
    counts = replicas.new_empty(num_experts) if alone else replicas.new_zeros(num_experts)
    schedule = Schedule(
        replica=torch.empty_like(counts),
        instance=torch.empty_like(counts),
        load=torch.empty_like(load),
        replica_of_choice=replicas.new_empty(topk_ids.shape),
    )
    experts_pow2 = max(SIDE.value, triton.next_power_of_2(num_experts))
    # A whole warp: its lanes are reduced by one instruction.
    instances_pow2 = max(32, triton.next_power_of_2(num_instances))
    grid = (triton.cdiv(num_choices, _CHUNK),)
    if not alone:
        _tokens_kernel[grid](topk_ids, counts, num_choices, num_experts, CHUNK=_CHUNK)
    _assign_kernel[(1,)](
        topk_ids,
        counts,
        replicas,
        live,
        load,
        costs.weights,
        costs.row,
        *replicas.new_empty(2, experts_pow2 + 2),
        schedule.replica,
        schedule.instance,
        schedule.load,
        schedule.replica_of_choice,
        num_choices,
        num_experts,
        num_instances,
        *window,
        EXPERTS_POW2=experts_pow2,
        INSTANCES_POW2=instances_pow2,
        PART=min(experts_pow2, max(1, _TILE // instances_pow2)),
        ALONE=alone,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    if not alone:
        _choices_kernel[grid](
            topk_ids,
            schedule.replica,
            schedule.replica_of_choice,
            num_choices,
            num_experts,
            *window,
            CHUNK=_CHUNK,
        )
    return schedule
