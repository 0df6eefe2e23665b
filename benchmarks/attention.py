"""Attention on CPUs over paged keys and values, in Qwen3-30B-A3B's shape, beside torch's own over contiguous ones."""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moesaic.cli.machine.facts import gemm_gflops
from moesaic.kernels.kv_rows import store_grouped
from moesaic.kernels.paged_attention import paged_attention
from moesaic.kernels.paged_rows import KVLayout, PagedRows

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 4, 128, 16
LENGTHS = (1024, 8192, 30_000)  # positions, those of the rows included
ROWS = {"chunk": 512, "decode": 1}
NEAR = 2e-4


def run(quick: bool) -> dict[str, Any]:
    """Measure chunks of a prompt and single rows, both sides in turns."""
    turns = 3 if quick else 9
    figures: dict[str, Any] = {"product_gflops": gemm_gflops()}
    for length in LENGTHS[: 2 if quick else None]:
        for name, rows in ROWS.items():
            figures[f"{name}_{length}"] = _measure(length, rows, turns)
    return {
        "config": {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": DIM,
            "block_size": BLOCK_SIZE,
            "rows": ROWS,
            "turns": turns,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
        "figures": figures,
        "notes": [
            "float32; torch: scaled_dot_product_attention over keys and values that lie together",
            "gflops: products of the positions that rows see; product: of two large matrices",
            *(["quick: fewer turns and lengths, the same code path"] if quick else []),
        ],
    }


def _measure(length: int, rows: int, turns: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(length)
    keys, values = torch.randn(2, KV_HEADS, length, DIM, generator=random)
    queries = torch.randn(rows, HEADS, DIM, generator=random)
    ours, theirs = _paged(queries, keys, values), _contiguous(queries, keys, values)
    assert torch.allclose(ours(), theirs(), atol=NEAR), "the two sides differ"
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(turns):
        for name, attend in (("ours", ours), ("torch", theirs)):
            began = time.perf_counter()
            attend()
            seconds[name].append(time.perf_counter() - began)
    seen = rows * (length - (rows - 1) / 2)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    return {
        "ms": {name: round(median(each) * 1e3, 3) for name, each in seconds.items()},
        "gflops": round(4 * HEADS * DIM * seen / median(seconds["ours"]) / 1e9, 1),
        "times_torch": {
            "p50": round(median(ratios), 2),
            "min": round(min(ratios), 2),
            "max": round(max(ratios), 2),
        },
    }


def _paged(queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """Attention over the same keys and values in blocks that are scattered over a cache."""
    length, rows = keys.shape[1], len(queries)
    num_blocks = -(-length // BLOCK_SIZE)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    cached = torch.zeros(num_blocks * BLOCK_SIZE, 2 * KV_HEADS * DIM)
    positions = torch.arange(length)
    offsets = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    # Nothing is rotated
    cos, sin = torch.ones(length, DIM), torch.zeros(length, DIM)
    qkv = torch.cat([keys.new_zeros(HEADS, length, DIM), keys, values]).transpose(0, 1).contiguous()
    store_grouped(qkv, HEADS, None, 0.0, cos, sin, False, offsets, cached, BLOCK_SIZE)

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    tables = table.to(torch.int32)[None].contiguous()
    paged = PagedRows(int32(0), int32(rows), int32(length), tables, rows, length)
    layout, out = KVLayout.grouped(KV_HEADS, DIM), torch.empty_like(queries)

    def attend() -> Tensor:
        paged_attention(queries, cached, paged, layout, BLOCK_SIZE, DIM**-0.5, None, out)
        return out

    return attend


def _contiguous(queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    rows, length = len(queries), keys.shape[1]
    heads_first = queries.transpose(0, 1).contiguous()[None]
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)

    def attend() -> Tensor:
        out = scaled_dot_product_attention(
            heads_first, keys[None], values[None], attn_mask=seen, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend
