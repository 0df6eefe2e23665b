"""Comparison of tile shapes in the grouped products, from which ``tile_shapes`` is set."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.kernels.cases import SHAPES, ExpertShape, normal
from moesaic.kernels.gated_mlp import PlainMLP
from moesaic.kernels.triton.expert_order import expert_order
from moesaic.kernels.triton.grouped_products import (
    SlotWeights,
    TileShape,
    grouped_products,
    tile_shapes,
)

Timer = Callable[[Callable[[], object]], tuple[float, list[float]]]
ROWS = (16, 256, 8192)


def measure_tiles(timer: Timer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure both products together, in microseconds, fastest first, for each batch and shape of tile."""
    shape = SHAPES[0]
    mlps = [
        PlainMLP(
            normal(2 * shape.size, shape.hidden) * shape.hidden**-0.5,
            normal(shape.hidden, shape.size) * shape.size**-0.5,
        )
        for _ in range(shape.num_experts)
    ]
    slots = SlotWeights.of(mlps)
    for num_rows in ROWS:
        yield f"{shape.model}, {num_rows} rows", _compared(timer, shape, slots, num_rows)


def _compared(
    timer: Timer, shape: ExpertShape, slots: SlotWeights, num_rows: int
) -> dict[str, Any]:
    hidden = normal(num_rows, shape.hidden)
    ids = torch.rand(num_rows, shape.num_experts, device="cuda").argsort(dim=1)
    ids = ids[:, : shape.top_k].contiguous()
    rows_per_slot = ids.numel() / shape.num_experts
    chosen = tile_shapes(rows_per_slot, shape.hidden, shape.size, hidden.dtype)
    times = {}
    for tiles in _candidates(rows_per_slot):
        order = expert_order(ids, shape.num_experts, tiles[0].rows)
        try:
            times[_name(tiles)] = timer(
                lambda order=order, tiles=tiles: grouped_products(  # type: ignore[misc]  # defaults bind the loop's values
                    hidden, slots, order, shape.top_k, tiles
                )
            )[0]
        # Most often it needs more shared memory than there is.
        except (TritonError, RuntimeError):
            continue
    return {"chosen": _name(chosen), **dict(sorted(times.items(), key=lambda item: item[1]))}


def _candidates(rows_per_slot: float) -> Iterator[tuple[TileShape, TileShape]]:
    few = rows_per_slot <= 16
    heights = (16, 32) if few else (64, 128)
    widths = (32, 64, 128) if few else (64, 128, 256)
    for rows, columns, depth, stages in product(heights, widths, (64, 128), (3, 4)):
        warps = 4 if few or rows * columns <= 8192 else 8
        # It has two products.
        first = TileShape(rows, max(columns // 2, 32), depth, warps, stages)
        yield first, TileShape(rows, columns, depth, warps, stages)


def _name(tiles: tuple[TileShape, TileShape]) -> str:
    return " + ".join(
        f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.num_warps}s{tile.num_stages}"
        for tile in tiles
    )
