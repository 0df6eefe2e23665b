# Paged attention: the rows of several sequences attend to their cached tokens, where they lie.
#   Layout     the cache's rows are tokens: token i of block b is row b * block_size + i. A row holds
#              the keys of all heads and, from value_column on, their values. With latent attention
#              the one head's values are the first columns of its key.
#   Order      scores, sums and outputs in float32, softmax over the keys seen.
"""Paged attention: the choice of the kernel, the call of that for CPUs, and the torch reference."""

import torch
from torch import Tensor

from moesaic.kernels.kv_rows import key_stride
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.native.library import lib, scratch, usable
from moesaic.native.structs import BatchArgs, ShapeArgs


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
    """Write the attention of ``rows`` to their rows of ``out``; others stay as they are.

    Args:
        queries: float32 or bfloat16 ``[T, heads, key_dim]``.
        cached: one layer's cache, same dtype, ``[tokens, width]``.
        rows: the queries, and the positions that they see.
        layout: layout of a cached row.
        block_size: tokens a block.
        scale: multiplies the scores.
        window: a row sees its own and the ``window - 1`` positions before it; None: all.
        out: same dtype, ``[T, heads, value_dim]``.
        sinks: float32 ``[heads]``: one more logit of each row's softmax, not scaled, which weighs no value (attention
            sinks, arXiv:2309.17453, learnt as in gpt-oss); None: there are none.
    """
    if queries.is_cuda:
        from moesaic.kernels.triton import split_attention as kernel

        kernel.paged_attention(queries, cached, rows, layout, block_size, scale, window, out, sinks)
    elif usable(queries):
        _on_a_cpu(queries, cached, rows, layout, block_size, scale, window, out, sinks)
    else:
        paged_attention_reference(
            queries, cached, rows, layout, block_size, scale, window, out, sinks
        )


def _on_a_cpu(
    queries: Tensor,
    cached: Tensor,
    rows: PagedRows,
    layout: KVLayout,
    block_size: int,
    scale: float,
    window: int | None,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    num_heads = queries.shape[1]
    assert queries.stride()[1:] == (layout.key_dim, 1)
    assert out.is_contiguous()
    assert cached.is_contiguous()
    assert sinks is None or (sinks.is_contiguous() and sinks.dtype == torch.float32)
    shape = shape_of(layout, num_heads, queries.stride(0), block_size, window, scale)
    shape.sinks = None if sinks is None else sinks.data_ptr()
    batch = batch_of(rows)
    threads, kernels = torch.get_num_threads(), lib()
    needed = kernels.attention_scratch(shape=shape, batch=batch, threads=threads)
    kernels.attention(
        shape=shape,
        batch=batch,
        queries=queries.data_ptr(),
        cache=cached.data_ptr(),
        out=out.data_ptr(),
        scratch=scratch(needed),
        threads=threads,
    )


def shape_of(
    layout: KVLayout,
    num_heads: int,
    query_stride: int,
    block_size: int,
    window: int | None,
    scale: float,
) -> ShapeArgs:
    """Fill ``struct shape``: the place of heads in the queries and in a CPU's cache.

    In a block of grouped heads, each head's keys lie together, and then its values: one stream each.
    """
    grouped, dim = layout.value_column > 0, layout.key_dim
    between_numbers = key_stride(block_size) if grouped else 1
    return ShapeArgs(
        heads=num_heads,
        kv_heads=layout.num_kv_heads,
        key_dim=dim,
        value_dim=layout.value_dim,
        block_stride=block_size * dim * (2 * layout.num_kv_heads if grouped else 1),
        head_stride=2 * block_size * dim,
        token_stride=dim if between_numbers == 1 else 1,
        key_stride=between_numbers,
        value_start=block_size * dim if grouped else 0,
        value_stride=dim,
        block_size=block_size,
        window=window or 0,
        query_stride=query_stride,
        out_stride=num_heads * layout.value_dim,
        scale=scale,
    )


def batch_of(rows: PagedRows) -> BatchArgs:
    """Fill ``struct batch``, which points into ``rows``."""
    facts = rows.first_rows, rows.num_rows, rows.lengths, rows.block_tables
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in facts)
    return BatchArgs(
        first_rows=rows.first_rows.data_ptr(),
        num_rows=rows.num_rows.data_ptr(),
        lengths=rows.lengths.data_ptr(),
        block_tables=rows.block_tables.data_ptr(),
        count=len(rows.lengths),
        table_width=rows.block_tables.shape[1],
    )


def paged_attention_reference(
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
    """Compute as ``paged_attention``, one sequence after the other."""
    sequences = zip(
        rows.first_rows.tolist(),
        rows.num_rows.tolist(),
        rows.lengths.tolist(),
        rows.block_tables.long(),
        strict=True,
    )
    for first, count, length, block_table in sequences:
        token = torch.arange(length, device=queries.device)
        kept = cached[block_table[token // block_size] * block_size + token % block_size].float()
        keys = _heads(kept, 0, layout.num_kv_heads, layout.key_dim)
        values = _heads(kept, layout.value_column, layout.num_kv_heads, layout.value_dim)
        position = token[length - count :].unsqueeze(1)
        seen = token <= position
        if window is not None:
            seen &= token > position - window
        mine = queries[first : first + count].float()
        # [n, kv_heads, group, key_dim]
        grouped = mine.reshape(count, layout.num_kv_heads, -1, layout.key_dim)
        scores = torch.einsum("nhgd,lhd->hgnl", grouped, keys) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            each = sinks.view(layout.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, each), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        attended = torch.einsum("hgnl,lhd->nhgd", weights, values).flatten(1, 2)
        out[first : first + count] = attended.to(out.dtype)


def _heads(kept: Tensor, column: int, num_kv_heads: int, dim: int) -> Tensor:
    return kept[:, column : column + num_kv_heads * dim].reshape(-1, num_kv_heads, dim)
