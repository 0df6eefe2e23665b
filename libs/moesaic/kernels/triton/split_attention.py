# Paged attention of few rows to many keys: the keys of each sequence are attended to in pieces, side by side.
#   Grid       attend: as many programs as the multiprocessors take, whatever lengths there may be. They take
#              the pieces of all sequences in turn, each for one head of the keys and one tile of rows. merge:
#              (B * rows, heads).
#   Layout     as moesaic.kernels.paged_attention; pieces float32 [B, rows, heads, pieces, value_dim], piece_scores
#              likewise: scratch.
#   Cost       memory-bound: what the sequences have cached is read once per tile. A captured launch costs what
#              the lengths of its rows cost, not what the longest one might.
#   Order      pieces are cut by position, and by the length of the sequence alone: at most MAX_PIECES, which are
#              merged in ascending order. So a decoded row gets the same bits whatever rows are beside it.
#   Reference  moesaic.kernels.paged_attention.paged_attention_reference.
"""Paged attention for CUDA: the choice of the launch, and that of few rows to many keys."""

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels import attention_pieces
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.kernels.triton import paged_attention as whole
from moesaic.kernels.triton.paged_attention import (
    FEW_ROWS,
    LOG2_E,
    _attend_keys,
    _columns,
    _first_key,
    _piece_size,
    launch_shape,
)
from moesaic.kernels.triton.shared_memory import num_multiprocessors

_PROGRAMS_PER_SM = 4
_TABLES = ["first_rows", "num_rows", "lengths"]


@triton.jit(
    do_not_specialize=["num_sequences", "tiles", "table_stride", "max_rows", "max_pieces"],
    do_not_specialize_on_alignment=_TABLES,
)
def _attend_pieces_kernel(
    queries,
    cached,
    pieces,
    piece_scores,
    first_rows,
    num_rows,
    lengths,
    block_tables,
    query_stride,
    head_stride,
    table_stride,
    num_sequences,
    tiles,
    max_rows,
    max_pieces,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMN: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    EXTRA: tl.constexpr,
    VALUES: tl.constexpr,
    SHARED: tl.constexpr,
    CACHED_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # The pieces of all sequences in a row: `before` of each lie those of the ones before it.
    each = tl.arange(0, SEQUENCES)
    counts = tl.load(num_rows + each, mask=each < num_sequences, other=0)
    all_lengths = tl.load(lengths + each, mask=each < num_sequences, other=0)
    sizes = _piece_size(all_lengths, SPLIT, MAX_PIECES)
    firsts = _first_key(all_lengths - counts, WINDOW) // sizes
    amounts = tl.where(counts > 0, tl.cdiv(all_lengths, sizes) - firsts, 0)
    ends = tl.cumsum(amounts, axis=0)
    shifts = ends - amounts - firsts
    item = tl.program_id(0)
    while item < tl.sum(amounts) * NUM_KV_HEADS * tiles:
        first_pair = item % tiles * TILE_ROWS
        kv_head = item // tiles % NUM_KV_HEADS
        unit = item // tiles // NUM_KV_HEADS
        item += tl.num_programs(0)
        sequence = tl.sum((ends <= unit).to(tl.int32))
        piece = unit - tl.sum(tl.where(each == sequence, shifts, 0))
        size = tl.sum(tl.where(each == sequence, sizes, 0))
        count = tl.load(num_rows + sequence)
        length = tl.load(lengths + sequence)
        pair = first_pair + tl.arange(0, TILE_ROWS)
        row = pair // group
        real = row < count
        first_position = length - count + first_pair // group
        last_row = tl.minimum((first_pair + TILE_ROWS - 1) // group, count - 1)
        begin = tl.maximum(piece * size, _first_key(first_position, WINDOW))
        end = tl.minimum((piece + 1) * size, length - count + last_row + 1)
        # Else no row of the tile sees the piece, and none of them merges it.
        if (begin < end) & (first_pair < count * group):
            head = kv_head * group + pair % group
            token = (tl.load(first_rows + sequence) + tl.where(real, row, 0)).to(tl.int64)
            query_row = queries + (token * query_stride + head * head_stride)[:, None]
            query = _columns(query_row, 0, MAIN_DIM, MAIN)
            # Not read
            query_extra = query
            if EXTRA > 0:
                query_extra = _columns(query_row, MAIN_DIM, KEY_DIM - MAIN_DIM, EXTRA)
            total, largest, weight = _attend_keys(
                query, query_extra, length - count + row, first_position, length - count + last_row,
                cached + kv_head * KEY_DIM, cached + VALUE_COLUMN + kv_head * VALUE_DIM,
                block_tables + sequence.to(tl.int64) * table_stride, begin, end, scale_log2,
                KEY_DIM, VALUE_DIM, MAIN_DIM, MAIN, EXTRA, VALUES, SHARED, CACHED_STRIDE, BLOCK_SIZE,
                WINDOW, TILE_ROWS, TILE_KEYS, AHEAD,
            )  # fmt: skip
            weight = tl.where(weight == 0.0, 1.0, weight)
            place = (sequence * max_rows + row).to(tl.int64) * NUM_HEADS + head
            at = place * max_pieces + piece
            tl.store(piece_scores + at, largest + tl.log2(weight), mask=real)
            value = tl.arange(0, VALUES)[None, :]
            store = real[:, None] & (value < VALUE_DIM)
            tl.store(pieces + at[:, None] * VALUE_DIM + value, total / weight[:, None], mask=store)


def paged_attention(
    queries: Tensor,
    cached: Tensor,
    rows: PagedRows,
    layout: KVLayout,
    block_size: int,
    scale: float,
    window: int | None,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Compute as ``moesaic.kernels.paged_attention.paged_attention``; never waits for the device."""
    max_pieces = attention_pieces.most_pieces(rows.max_length, layout.value_dim)
    num_sequences = len(rows.lengths)
    if rows.max_rows > FEW_ROWS or max_pieces == 1 or not num_sequences:
        whole.paged_attention(queries, cached, rows, layout, block_size, scale, window, out, sinks)
        return
    num_heads = queries.shape[1]
    assert queries.stride(2) == cached.stride(1) == rows.block_tables.stride(1) == 1
    assert out.is_contiguous()
    num_pairs = rows.max_rows * (num_heads // layout.num_kv_heads)
    shape = launch_shape(num_pairs, layout, queries.dtype)
    tiles = triton.cdiv(num_pairs, shape["TILE_ROWS"])
    pieces, piece_scores = whole.scratch(queries, rows, layout.value_dim, max_pieces)
    least = attention_pieces.least_keys(layout.value_dim)
    items = num_sequences * max_pieces * layout.num_kv_heads * tiles
    _attend_pieces_kernel[(min(items, _PROGRAMS_PER_SM * num_multiprocessors()),)](
        queries,
        cached,
        pieces,
        piece_scores,
        rows.first_rows,
        rows.num_rows,
        rows.lengths,
        rows.block_tables,
        queries.stride(0),
        queries.stride(1),
        rows.block_tables.stride(0),
        num_sequences,
        tiles,
        rows.max_rows,
        max_pieces,
        scale * LOG2_E.value,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=layout.num_kv_heads,
        KEY_DIM=layout.key_dim,
        VALUE_DIM=layout.value_dim,
        VALUE_COLUMN=layout.value_column,
        SHARED=layout.value_column == 0,
        CACHED_STRIDE=cached.stride(0),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SPLIT=least,
        MAX_PIECES=attention_pieces.MAX_PIECES,
        SEQUENCES=max(16, triton.next_power_of_2(num_sequences)),
        **shape,
    )
    whole.merge(pieces, piece_scores, out, sinks, rows, window, least, attention_pieces.MAX_PIECES)
