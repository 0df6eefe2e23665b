# Paged attention on a GPU: decoded rows, chunks of prompts and whole prompts, by one kernel.
#   Grid       (B * kv_heads, tiles, pieces). A tile is TILE_ROWS pairs of a row and a
#              head of one group: they share every key and value that is read. Tiles with the most
#              keys begin first.
#   Layout     as moesaic.kernels.paged_attention. Latent values lie in the keys' first columns, so
#              one read serves both products.
#   Cost       decode: memory-bound, what the sequences have cached is read once per tile; prefill:
#              2 * (key_dim + value_dim) operations for each row, head and key seen.
#   Order      keys ascend, in steps that begin at multiples of TILE_KEYS. Chunks of prompts are cut
#              into as many pieces as fill the GPU best, which are merged in ascending order. With
#              several rows the height of a tile follows the longest run, and with it the last bits.
#              Few rows that meet many keys are moesaic.kernels.triton.split_attention's.
#   Reference  moesaic.kernels.paged_attention.paged_attention_reference.
"""Paged attention for CUDA."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.kernels.triton.shared_memory import is_roomy, num_multiprocessors

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1e38)  # the largest score of a row that has seen no key
FEW_ROWS = 16  # more rows than this are split only where their tiles do not fill the GPU
_MOST_PIECES = 16  # of a chunk
_MOST_PROGRAMS = (
    16  # of a multiprocessor, in pieces: bounds the scratch, to 264 MiB of latents on an H100
)
_PIECE_KEYS = 256  # to begin a piece and to merge it takes a tile as long as so many keys
# Rows of one tensor, whose places in it follow from the number of sequences: each kind of place would
# be compiled anew.
_TABLES = ["first_rows", "num_rows", "lengths"]


@triton.jit
def _first_key(position, WINDOW: tl.constexpr):
    """The first key that a row at ``position`` sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    return position * 0


@triton.jit
def _columns(rows, FIRST: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load ``DIM`` columns of rows, and zeros behind them."""
    column = tl.arange(0, PADDED)[None, :]
    if DIM == PADDED:
        return tl.load(rows + (FIRST + column))
    return tl.load(rows + (FIRST + column), mask=column < DIM, other=0.0)


@triton.jit
def _find_keys(block_table, start, begin, end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Load the blocks of the step of keys at ``start``, and return each key's place in its block.

    Outside ``begin..end-1`` the cache may hold anything, NaN too: the nearest key takes the place.
    """
    key = tl.maximum(tl.minimum(start + tl.arange(0, TILE_KEYS), end - 1), begin).to(tl.uint32)
    return tl.load(block_table + key // BLOCK_SIZE), (key % BLOCK_SIZE).to(tl.int32)


@triton.jit
def _mask(scores, position, start, begin, end, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Hide the keys of a step that a row does not see."""
    key = start + tl.arange(0, TILE_KEYS)[None, :]
    seen = (key >= begin) & (key < end) & (key <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key > position[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _attend_keys(
    query,
    query_extra,
    position,
    first_position,
    last_position,
    keys_of_head,
    values_of_head,
    block_table,
    begin,
    end,
    scale_log2,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
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
):
    """Attend to the keys ``begin..end-1``: unnormalised sums, largest score, sum of weights.

    Blocks are looked up a step before their keys are loaded. Otherwise Triton shares its stages between
    the two loads, and keeps one buffer of keys only.
    """
    total = tl.zeros((TILE_ROWS, VALUES), tl.float32)
    largest = tl.full((TILE_ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((TILE_ROWS,), tl.float32)
    # All rows see all keys of the steps within.
    clear_begin, clear_end = begin, tl.minimum(end, first_position + 1)
    if WINDOW > 0:
        clear_begin = tl.maximum(begin, last_position - WINDOW + 1)
    first = begin // TILE_KEYS * TILE_KEYS
    block, place = _find_keys(block_table, first, begin, end, BLOCK_SIZE, TILE_KEYS)
    if AHEAD:
        row = (block * BLOCK_SIZE + place).to(tl.int64)[:, None] * CACHED_STRIDE
        scores_ahead = tl.dot(query, tl.trans(_columns(keys_of_head + row, 0, MAIN_DIM, MAIN)))
        block, place = _find_keys(block_table, first + TILE_KEYS, begin, end, BLOCK_SIZE, TILE_KEYS)
    for start in range(first, end, TILE_KEYS):
        next_row = (block * BLOCK_SIZE + place).to(tl.int64)[:, None] * CACHED_STRIDE
        keys = _columns(keys_of_head + next_row, 0, MAIN_DIM, MAIN)
        if AHEAD:
            # The matrix unit multiplies while the softmax of this step is computed.
            scores = scores_ahead
            scores_ahead = tl.dot(query, tl.trans(keys))
            looked_up = start + 2 * TILE_KEYS
        else:
            row = next_row
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if EXTRA > 0:
                keys_extra = _columns(keys_of_head + row, MAIN_DIM, KEY_DIM - MAIN_DIM, EXTRA)
                scores = tl.dot(query_extra, tl.trans(keys_extra), scores, input_precision="ieee")
            looked_up = start + TILE_KEYS
        block, place = _find_keys(block_table, looked_up, begin, end, BLOCK_SIZE, TILE_KEYS)
        if AHEAD:
            if (start < clear_begin) | (start + TILE_KEYS > clear_end):
                scores = _mask(scores, position, start, begin, end, WINDOW, TILE_KEYS)
        else:
            scores = _mask(scores, position, start, begin, end, WINDOW, TILE_KEYS)
        now = tl.maximum(largest, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - now[:, None])
        shrink = tl.exp2(largest - now)
        weight = weight * shrink + tl.sum(weights, axis=1)
        values = keys if SHARED else _columns(values_of_head + row, 0, VALUE_DIM, VALUES)
        total = tl.dot(
            weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee"
        )
        largest = now
        if AHEAD:
            row = next_row
    return total, largest, weight


@triton.jit(
    do_not_specialize=["table_stride", "max_rows", "max_pieces", "piece_keys"],
    do_not_specialize_on_alignment=_TABLES,
)
def _attend_kernel(
    queries,
    cached,
    out,
    sinks,
    pieces,
    piece_scores,
    first_rows,
    num_rows,
    lengths,
    block_tables,
    query_stride,
    head_stride,
    table_stride,
    max_rows,
    max_pieces,
    piece_keys,
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
    SINKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_pair = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_ROWS
    count = tl.load(num_rows + sequence)
    if first_pair >= count * group:
        return
    length = tl.load(lengths + sequence)
    pair = first_pair + tl.arange(0, TILE_ROWS)
    row = pair // group
    real = row < count
    head = kv_head * group + pair % group
    token = (tl.load(first_rows + sequence) + tl.where(real, row, 0)).to(tl.int64)
    position = length - count + row
    begin_position = length - count + first_pair // group
    last_position = length - count + tl.minimum((first_pair + TILE_ROWS - 1) // group, count - 1)
    begin, end = _first_key(begin_position, WINDOW), last_position + 1
    piece = tl.program_id(2)
    if SPLIT:
        begin = tl.maximum(begin, piece * piece_keys)
        end = tl.minimum(end, (piece + 1) * piece_keys)
        if begin >= end:
            return

    query_row = queries + (token * query_stride + head * head_stride)[:, None]
    query = _columns(query_row, 0, MAIN_DIM, MAIN)
    # Not read
    query_extra = query
    if EXTRA > 0:
        query_extra = _columns(query_row, MAIN_DIM, KEY_DIM - MAIN_DIM, EXTRA)
    keys_of_head = cached + kv_head * KEY_DIM
    values_of_head = cached + VALUE_COLUMN + kv_head * VALUE_DIM
    block_table = block_tables + sequence.to(tl.int64) * table_stride
    total, largest, weight = _attend_keys(
        query, query_extra, position, begin_position, last_position, keys_of_head, values_of_head,
        block_table, begin, end, scale_log2,
        KEY_DIM, VALUE_DIM, MAIN_DIM, MAIN, EXTRA, VALUES, SHARED, CACHED_STRIDE, BLOCK_SIZE,
        WINDOW, TILE_ROWS, TILE_KEYS, AHEAD,
    )  # fmt: skip
    value = tl.arange(0, VALUES)
    store = real[:, None] & (value < VALUE_DIM)[None, :]
    # A row that fills the tile up, or sees no key of the piece.
    weight = tl.where(weight == 0.0, 1.0, weight)
    if SPLIT:
        at = ((sequence * max_rows + row).to(tl.int64) * NUM_HEADS + head) * max_pieces + piece
        tl.store(piece_scores + at, largest + tl.log2(weight), mask=real)
        where, into = at[:, None] * VALUE_DIM + value[None, :], pieces
    else:
        if SINKS:
            sink = tl.load(sinks + head) * LOG2_E
            now = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - now)
            total = total * shrink[:, None]
            weight = weight * shrink + tl.exp2(sink - now)
        where, into = (token * NUM_HEADS + head)[:, None] * VALUE_DIM + value[None, :], out
    tl.store(into + where, (total / weight[:, None]).to(into.dtype.element_ty), mask=store)


@triton.jit
def _piece_size(length, least, most_pieces):
    """Return the keys of each piece of sequences: ``least``, doubled until ``most_pieces`` hold a sequence."""
    size = length * 0 + least
    for _ in tl.static_range(16):
        size = tl.where(size * most_pieces < length, 2 * size, size)
    return size


@triton.jit(
    do_not_specialize=["max_rows", "max_pieces", "least", "most_pieces"],
    do_not_specialize_on_alignment=_TABLES,
)
def _merge_kernel(
    pieces,
    piece_scores,
    out,
    sinks,
    first_rows,
    num_rows,
    lengths,
    max_rows,
    max_pieces,
    least,
    most_pieces,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    sequence = tl.program_id(0) // max_rows
    row = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    count = tl.load(num_rows + sequence)
    if row >= count:
        return
    length = tl.load(lengths + sequence)
    size = _piece_size(length, least, most_pieces)
    position = length - count + row
    at = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * max_pieces
    value = tl.arange(0, VALUES)
    real = value < VALUE_DIM
    total = tl.zeros((VALUES,), tl.float32)
    largest = float("-inf")
    weight = 0.0
    if SINKS:
        largest = tl.load(sinks + head) * LOG2_E
        weight = 1.0
    for piece in range(_first_key(position, WINDOW) // size, position // size + 1):
        score = tl.load(piece_scores + at + piece)
        attended = tl.load(pieces + (at + piece) * VALUE_DIM + value, mask=real, other=0.0)
        now = tl.maximum(largest, score)
        shrink = tl.exp2(largest - now)
        share = tl.exp2(score - now)
        total = total * shrink + attended * share
        weight = weight * shrink + share
        largest = now
    token = (tl.load(first_rows + sequence) + row).to(tl.int64)
    where = (token * NUM_HEADS + head) * VALUE_DIM + value
    tl.store(out + where, (total / weight).to(out.dtype.element_ty), mask=real)


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
    num_heads, num_sequences = queries.shape[1], len(rows.lengths)
    assert queries.stride(2) == cached.stride(1) == rows.block_tables.stride(1) == 1
    assert out.is_contiguous()
    if not num_sequences:
        return
    num_pairs = rows.max_rows * (num_heads // layout.num_kv_heads)
    shape = launch_shape(num_pairs, layout, queries.dtype)
    tiles = triton.cdiv(num_pairs, shape["TILE_ROWS"])
    num_pieces = 1
    # A window leaves each tile few keys.
    if rows.max_rows > FEW_ROWS and not window:
        # Rows of a chunk see half of it on average.
        keys = rows.max_length - rows.max_rows // 2
        whole = num_sequences * layout.num_kv_heads * tiles
        num_pieces = best_pieces(whole, keys, num_multiprocessors())
    piece_keys = triton.cdiv(max(1, rows.max_length), num_pieces)
    num_pieces = triton.cdiv(max(1, rows.max_length), piece_keys)
    split = num_pieces > 1
    # Not touched unless split.
    pieces = piece_scores = out
    if split:
        pieces, piece_scores = scratch(queries, rows, layout.value_dim, num_pieces)
    _attend_kernel[(num_sequences * layout.num_kv_heads, tiles, num_pieces)](
        queries,
        cached,
        out,
        out if sinks is None else sinks.contiguous(),
        pieces,
        piece_scores,
        rows.first_rows,
        rows.num_rows,
        rows.lengths,
        rows.block_tables,
        queries.stride(0),
        queries.stride(1),
        rows.block_tables.stride(0),
        rows.max_rows,
        num_pieces,
        piece_keys,
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
        SINKS=sinks is not None,
        SPLIT=split,
        **shape,
    )
    if split:
        merge(pieces, piece_scores, out, sinks, rows, window, piece_keys, num_pieces)


def scratch(
    queries: Tensor, rows: PagedRows, value_dim: int, num_pieces: int
) -> tuple[Tensor, Tensor]:
    """Take memory for pieces float32 ``[B * rows, heads, num_pieces, value_dim]``, and for their scores."""
    shape = len(rows.lengths) * rows.max_rows, queries.shape[1], num_pieces
    pieces = queries.new_empty(*shape, value_dim, dtype=torch.float32)
    return pieces, queries.new_empty(shape, dtype=torch.float32)


def merge(
    pieces: Tensor,
    piece_scores: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    rows: PagedRows,
    window: int | None,
    least: int,
    most_pieces: int,
) -> None:
    """Merge what rows attended to, piece by piece.

    Args:
        pieces: from ``scratch``, filled.
        piece_scores: likewise, of base two.
        out: ``[T, heads, value_dim]``, to fill.
        sinks: float32 ``[heads]``; None: there are none.
        rows: the rows.
        window: keys that a row sees; None: all.
        least: keys of a piece, doubled until ``most_pieces`` hold the sequence.
        most_pieces: see there.
    """
    num_places, num_heads, num_pieces, value_dim = pieces.shape
    _merge_kernel[(num_places, num_heads)](
        pieces,
        piece_scores,
        out,
        out if sinks is None else sinks.contiguous(),
        rows.first_rows,
        rows.num_rows,
        rows.lengths,
        rows.max_rows,
        num_pieces,
        least,
        most_pieces,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        VALUES=_padded(value_dim),
        WINDOW=window or 0,
        SINKS=sinks is not None,
    )


def best_pieces(programs: int, keys: int, num_multiprocessors: int) -> int:
    """Choose the number of pieces that the keys of a chunk are cut into.

    Multiprocessors take one program after the other. With ``programs`` a little more than a multiple of
    them, or fewer, many idle at the end; more and shorter programs divide better, but each costs more.

    Args:
        programs: tiles of rows, of all heads and sequences; each attends to all its keys.
        keys: of a program, on average.
        num_multiprocessors: of the GPU.

    Returns:
        1 to ``_MOST_PIECES``: the least of those that end first; 1 is uncut.
    """
    most = min(_MOST_PIECES, max(1, _MOST_PROGRAMS * num_multiprocessors // programs))

    def duration(pieces: int) -> int:
        turns = -(-programs * pieces // num_multiprocessors)
        return turns * (-(-keys // pieces) + (_PIECE_KEYS if pieces > 1 else 0))

    return min(range(1, most + 1), key=duration)


def launch_shape(num_pairs: int, layout: KVLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Cut up a launch: as much as fits registers and shared memory, which a wide (latent) tile fills soon."""
    shared = layout.value_column == 0
    main_dim = layout.value_dim if shared else layout.key_dim
    main = _padded(main_dim)
    wide, exact = main > 256, dtype == torch.float32
    most_rows = 16 if exact else 128 if not wide else 64 if is_roomy() else 32
    tile_rows = max(16, min(most_rows, triton.next_power_of_2(num_pairs)))
    if exact:
        tile_keys, num_warps, num_stages = (16, 8, 1) if wide else (32, 4, 3)
    elif wide:
        small = not is_roomy() and tile_rows > 16
        tile_keys, num_warps, num_stages = 32 if small else 64, 8, 2
    elif tile_rows == 128:
        tile_keys, num_warps, num_stages = (64, 8, 3) if is_roomy() else (32, 8, 2)
    else:
        tile_keys, num_warps, num_stages = 64, 2 if tile_rows == 16 else 4, 3
    return {
        "MAIN_DIM": main_dim,
        "MAIN": main,
        "EXTRA": _padded(layout.key_dim - main_dim) if layout.key_dim > main_dim else 0,
        "VALUES": _padded(layout.value_dim),
        "TILE_ROWS": tile_rows,
        "TILE_KEYS": tile_keys,
        # What waits in registers takes the place of wider values.
        "AHEAD": tile_rows >= 64 and main <= 128 and not shared and is_roomy(),
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _padded(dim: int) -> int:
    # 16 is the least that a matrix unit takes.
    return max(16, triton.next_power_of_2(dim))
