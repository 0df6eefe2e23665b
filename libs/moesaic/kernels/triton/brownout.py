# Brownout: which experts keep their rows in a layer, and who serves the choices of the others.
#   Grid       count: (cdiv(T * k, CHUNK),); decide: (1,); rewrite: (cdiv(T, ROWS),).
#   Layout     topk_ids, topk_weights [T, k] row-major, changed in place; rows_by_level [V, E] for V
#              levels, and one more; the experts are a tile [GROUPS, WAY], so that a group is a row of it.
#   Cost       latency-bound: three launches and a fill; the host is never asked. Ids are read twice,
#              weights once, and of both only what changes is written. For each phase of the rows the
#              decision sorts the experts (twice if they have homes), and then looks at all of them for
#              each level.
#   Order      counts are integers, added with atomics, which leaves nothing open; shares are compared
#              in int64; a row's weights are added choice by choice, and in float64 for the factor that
#              keeps the row's sum: a few numbers a row, slow only where a GPU hardly has float64.
#   Reference  moesaic.brownout.split.split_choices; equal to the last bit.
"""The split of choices in three kernels."""

from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.brownout.split import WHOLE
from moesaic.kernels.promised import LayerSubstitution, PromisedRows, on_device

_CHUNK = 1024  # choices a program counts
_TILE = 1024  # choices a program rewrites
_WHOLE = tl.constexpr(WHOLE)

# A layer meets many batches: copied to the device once.
_serves: WeakKeyDictionary[LayerSubstitution, Tensor] = WeakKeyDictionary()
_homes: WeakKeyDictionary[LayerSubstitution, tuple[Tensor, int]] = WeakKeyDictionary()


# What differs from step to step is not specialised on: each kind of number would be compiled anew.
@triton.jit(do_not_specialize=["num_choices"])
def _count_rows_kernel(
    topk_ids,
    level_of_row,
    rows_by_level,
    num_choices,
    num_experts,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    real = choice < num_choices
    expert = tl.load(topk_ids + choice, mask=real, other=0)
    level = tl.load(level_of_row + choice // TOP_K, mask=real, other=0).to(tl.int32)
    tl.atomic_add(rows_by_level + level * num_experts + expert, 1, mask=real, sem="relaxed")


@triton.jit(do_not_specialize=["num_homes", "way", "most_levels"])
def _decide_kernel(
    rows_by_level,
    levels,  # as LevelTables.by_phase
    serves,  # int8 [E]: 0 where nobody can serve the expert
    homes,  # not read unless APART
    keys,  # int64 [E], scratch: of APART
    stay,
    num_experts,
    num_homes,
    way,
    most_levels,
    UNITED: tl.constexpr,
    APART: tl.constexpr,
    GROUPS: tl.constexpr,
    WAY: tl.constexpr,
):
    ID_BITS: tl.constexpr = 24  # of a key; the rest is the number of the expert's rows
    LARGEST: tl.constexpr = 2**63 - 1
    MOST: tl.constexpr = 2**13 - 1
    member = tl.arange(0, WAY)[None, :]
    expert = tl.arange(0, GROUPS)[:, None] * way + member
    real = (member < way) & (expert < num_experts)
    there = tl.load(serves + expert, mask=real, other=0) > 0
    stays = expert < 0
    chosen = expert < 0
    indices, thresholds = levels + 1, levels + 1 + most_levels
    bounds = thresholds + most_levels
    for phase in range(tl.load(levels)):
        begin = tl.load(bounds + phase)
        end = tl.load(bounds + phase + 1)
        rows = tl.zeros((GROUPS, WAY), tl.int64)
        for at in range(begin, end):
            counts = rows_by_level + tl.load(indices + at) * num_experts
            rows += tl.load(counts + expert, mask=real, other=0)
        chosen = chosen | (rows > 0)
        # Most rows first, then the lowest id. Places without an expert have none.
        key = (rows << ID_BITS) | ((1 << ID_BITS) - 1 - expert)
        in_order = tl.sort(tl.reshape(key, (GROUPS * WAY,)), descending=True)
        worth = in_order >> ID_BITS
        # By places among those of an instance, then as they were.
        if APART:
            own = (1 << ID_BITS) - 1 - (in_order & ((1 << ID_BITS) - 1))
            home = tl.load(homes + own, mask=worth > 0, other=-1)
            place = tl.zeros((GROUPS * WAY,), tl.int64)
            for h in range(num_homes):
                is_there = (home == h).to(tl.int64)
                place += is_there * (tl.cumsum(is_there, axis=0) - 1)
            so_far = tl.arange(0, GROUPS * WAY).to(tl.int64)
            # Of 63 bits 13 are for the place, 13 for the order so far, 24 for the expert.
            ranked = ((MOST - place) << 37) | ((MOST - so_far) << ID_BITS)
            in_order = tl.where(worth > 0, ranked | ((1 << ID_BITS) - 1 - own), 0)
            # Every thread has read the keys of the phase before.
            tl.debug_barrier()
            tl.store(keys + own, in_order, mask=worth > 0)
            tl.debug_barrier()
            key = tl.load(keys + expert, mask=rows > 0, other=0)
            in_order = tl.sort(in_order, descending=True)
            own = (1 << ID_BITS) - 1 - (in_order & ((1 << ID_BITS) - 1))
            worth = tl.zeros((GROUPS * WAY,), tl.int64)
            for at in range(begin, end):
                counts = rows_by_level + tl.load(indices + at) * num_experts
                worth += tl.load(counts + own, mask=in_order > 0, other=0)
        total = tl.sum(worth, axis=0)
        # What those before each have together.
        before = tl.cumsum(worth, axis=0) - worth
        for at in range(begin, end):
            parts = tl.load(thresholds + at).to(tl.int64)
            lacking = before * _WHOLE < parts * total
            last = tl.min(tl.where(lacking, in_order, LARGEST), axis=0)
            counts = rows_by_level + tl.load(indices + at) * num_experts
            wanted = tl.load(counts + expert, mask=real, other=0) > 0
            stays = stays | (wanted & (key >= last))
    stays = stays & there
    # An expert stays that would be the only one of its group to go.
    if UNITED:
        going = chosen & ~stays
        alone = tl.sum(going.to(tl.int32), axis=1, keep_dims=True) == 1
        stays = stays | (going & alone & there)
    tl.store(stay + expert, stays.to(tl.int8), mask=real)


@triton.jit
def _column(tile, choice, j):
    """Column ``j``, exactly: zeros are added to it."""
    return tl.sum(tl.where((choice == j)[None, :], tile, 0), axis=1)


@triton.jit(
    do_not_specialize=["num_rows", "way"],
    do_not_specialize_on_alignment=["degraded"],  # a row of a table, which begins anywhere
)
def _rewrite_kernel(
    topk_ids,
    topk_weights,
    stay,
    serves,
    degraded,
    num_rows,
    num_experts,
    way,
    UNITED: tl.constexpr,
    SAME_SUM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    choice = tl.arange(0, TOP_K_POW2)
    at = row[:, None] * TOP_K + choice[None, :]
    real = (row < num_rows)[:, None] & (choice < TOP_K)[None, :]
    expert = tl.load(topk_ids + at, mask=real, other=0)
    weight = tl.load(topk_weights + at, mask=real, other=0.0)
    goes = real & (tl.load(stay + expert, mask=real, other=1) == 0)
    # Each row keeps its heaviest choice.
    if SAME_SUM:
        there = real & (tl.load(serves + expert, mask=real, other=0) > 0)
        most = tl.max(tl.where(there, weight, -float("inf")), axis=1)
        heaviest = there & (weight == most[:, None])
        first = tl.min(tl.where(heaviest, expert, num_experts), axis=1)
        goes = goes & ~(there & (expert == first[:, None]))
    num_going = tl.sum(goes.to(tl.int32), axis=1)
    changes = goes
    if UNITED:
        server = tl.where(goes, num_experts + expert // way, -1)
        summed = tl.zeros((ROWS, TOP_K_POW2), tl.float32)
        is_first = goes
        for j in tl.static_range(TOP_K):
            same = goes & (server == _column(server, choice, j)[:, None])
            summed += tl.where(same, _column(weight, choice, j)[:, None], 0.0)
            is_first = is_first & ~(same & (choice > j)[None, :])
        server = tl.where(is_first, server, -1)
        weight = tl.where(is_first, summed, 0.0)
    else:
        server = tl.full((ROWS, TOP_K_POW2), -1, tl.int32)
        left = tl.where(goes, 0.0, weight)
        if SAME_SUM:
            whole = tl.zeros((ROWS,), tl.float64)
            kept = tl.zeros((ROWS,), tl.float64)
            for j in tl.static_range(TOP_K):
                whole += _column(weight, choice, j).to(tl.float64)
                kept += _column(left, choice, j).to(tl.float64)
            scaled = (num_going > 0) & (kept > 0)
            factor = tl.where(scaled, whole, 1.0) / tl.where(scaled, kept, 1.0)
            left = left * factor.to(tl.float32)[:, None]
            changes = real & (num_going > 0)[:, None]
        weight = left
    so_far = tl.load(degraded + row, mask=row < num_rows, other=0)
    # Every thread has read what is written over now.
    tl.debug_barrier()
    tl.store(topk_ids + at, server, mask=goes)
    tl.store(topk_weights + at, weight, mask=changes)
    tl.store(degraded + row, so_far + num_going, mask=(row < num_rows) & (num_going > 0))


def split_choices(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, layer: LayerSubstitution
) -> None:
    """See ``moesaic.kernels.brownout.split_choices``."""
    num_rows, top_k = topk_ids.shape
    device, num_experts, substitution = topk_ids.device, layer.num_experts, layer.substitution
    assert num_rows == len(promised)
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    assert topk_ids.is_contiguous()
    assert topk_weights.is_contiguous()
    assert topk_weights.device == promised.degraded.device == device
    if not num_rows:
        return
    levels, level_of_row, most_levels = promised.tables()
    united = substitution.instead == "united"
    way = substitution.way if united else 1
    serves, (homes, num_homes) = _serves_on(device, layer), _homes_on(device, layer)
    # The last row is of rows that count nowhere.
    rows_by_level = topk_ids.new_zeros(most_levels + 1, num_experts)
    stay = topk_ids.new_empty(num_experts, dtype=torch.int8)
    _count_rows_kernel[(triton.cdiv(num_rows * top_k, _CHUNK),)](
        topk_ids,
        level_of_row,
        rows_by_level,
        num_rows * top_k,
        num_experts,
        TOP_K=top_k,
        CHUNK=_CHUNK,
    )
    groups_pow2 = max(16, triton.next_power_of_2(triton.cdiv(num_experts, way)))
    way_pow2 = triton.next_power_of_2(way)
    _decide_kernel[(1,)](
        rows_by_level,
        levels,
        serves,
        serves if homes is None else homes,
        stay if homes is None else topk_ids.new_empty(num_experts, dtype=torch.int64),
        stay,
        num_experts,
        num_homes,
        way,
        most_levels,
        UNITED=united,
        APART=homes is not None,
        GROUPS=groups_pow2,
        WAY=way_pow2,
        num_warps=min(8, max(1, groups_pow2 * way_pow2 // 128)),
    )
    top_k_pow2 = triton.next_power_of_2(top_k)
    rows = _TILE // top_k_pow2
    _rewrite_kernel[(triton.cdiv(num_rows, rows),)](
        topk_ids,
        topk_weights,
        stay,
        serves,
        promised.counts,
        num_rows,
        num_experts,
        way,
        UNITED=united,
        SAME_SUM=substitution.instead == "fewer",
        TOP_K=top_k,
        TOP_K_POW2=top_k_pow2,
        ROWS=rows,
    )


def _serves_on(device: torch.device, layer: LayerSubstitution) -> Tensor:
    """1 for each expert that somebody can serve, else 0, int8 ``[E]``."""
    found = _serves.get(layer)
    if found is None or found.device != device:
        lost = torch.zeros(layer.num_experts) if layer.lost is None else layer.lost
        found = _serves[layer] = on_device((lost == 0).to(torch.int8), device)
    return found


def _homes_on(device: torch.device, layer: LayerSubstitution) -> tuple[Tensor | None, int]:
    """The instance of each expert, int32 ``[E]``, and the number of instances; None: there is one."""
    if layer.homes is None:
        return None, 1
    found = _homes.get(layer)
    if found is None or found[0].device != device:
        found = _homes[layer] = on_device(layer.homes, device), int(layer.homes.max()) + 1
    return found
