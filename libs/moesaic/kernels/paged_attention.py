# Paged attention: the rows of several sequences attend to their cached tokens, where they lie.
#   Layout     the cache's rows are tokens: token i of block b is row b * block_size + i. A row holds
#              the keys of all heads and, from value_column on, their values. With latent attention
#              the one head's values are the first columns of its key.
#   Order      scores, sums and outputs in float32, softmax over the keys seen.
"""Paged attention: what is attended to, the torch reference, and the choice of the kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.kv_rows import key_stride
from moesaic.kernels.native.library import Batch, Shape, lib, scratch, usable


@dataclass(frozen=True)
class KVLayout:
    """Where a cached row keeps what its heads need; heads share keys and values in equal groups."""

    num_kv_heads: int
    key_dim: int  # head h's key begins at column h * key_dim
    value_dim: int
    value_column: int  # where the first head's value begins; 0: values are the keys' first columns

    @classmethod
    def grouped(cls, num_kv_heads: int, head_dim: int) -> "KVLayout":
        """All keys, then all values."""
        return cls(num_kv_heads, head_dim, head_dim, num_kv_heads * head_dim)

    @classmethod
    def latent(cls, kv_lora_rank: int, rope_dim: int) -> "KVLayout":
        """One head for all: the latent is its value, and with the rotated key its key."""
        return cls(1, kv_lora_rank + rope_dim, kv_lora_rank, 0)


@dataclass(frozen=True)
class PagedRows:
    """The query rows of ``B`` sequences. A sequence's rows are its last tokens; each sees its own
    position and those before it.

    Tensors are int32, on the device of the queries. The two bounds are known to the host, so that
    a launch need not ask the device; they may be larger than what they bound.
    """

    first_rows: Tensor  # [B]: which of the queries is the sequence's first
    num_rows: Tensor  # [B]
    lengths: Tensor  # [B]: cached tokens, those of the rows included
    block_tables: Tensor  # [B, M]; entries past the length are not read
    max_rows: int
    max_length: int


def paged_attention(
    queries: Tensor,
    cached: Tensor,
    rows: PagedRows,
    layout: KVLayout,
    block_size: int,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Write what ``rows`` attend to into theirs of ``out``; others are left as they are.

    Args:
        queries: float32 or bfloat16 ``[T, heads, key_dim]``.
        cached: one layer's cache, same dtype, ``[tokens, width]``.
        rows: which queries, and what they see.
        layout: of a cached row.
        block_size: tokens a block.
        scale: multiplies the scores.
        window: a row sees its own and the ``window - 1`` positions before it; None: all.
        out: same dtype, ``[T, heads, value_dim]``.
    """
    if queries.is_cuda:
        from moesaic.kernels import paged_attention_triton as kernel

        kernel.paged_attention(queries, cached, rows, layout, block_size, scale, window, out)
    elif usable(queries):
        _on_a_cpu(queries, cached, rows, layout, block_size, scale, window, out)
    else:
        paged_attention_reference(queries, cached, rows, layout, block_size, scale, window, out)


def _on_a_cpu(
    queries: Tensor,
    cached: Tensor,
    rows: PagedRows,
    layout: KVLayout,
    block_size: int,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    num_heads = queries.shape[1]
    assert queries.stride()[1:] == (layout.key_dim, 1)
    assert out.is_contiguous()
    assert cached.is_contiguous()
    shape = shape_of(layout, num_heads, queries.stride(0), block_size, window, scale)
    batch = batch_of(rows)
    threads = torch.get_num_threads()
    lib().attention(
        shape,
        batch,
        queries.data_ptr(),
        cached.data_ptr(),
        out.data_ptr(),
        scratch(lib().attention_scratch(shape, batch, threads)),
        threads,
    )


def shape_of(
    layout: KVLayout,
    num_heads: int,
    query_stride: int,
    block_size: int,
    window: int | None,
    scale: float,
) -> Shape:
    """``struct shape``: how heads lie in the queries and in a CPU's cache. Of a block of grouped heads,
    each head's keys lie together, and then its values: one stream each."""
    grouped, dim = layout.value_column > 0, layout.key_dim
    between_numbers = key_stride(block_size) if grouped else 1
    return Shape(
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


def batch_of(rows: PagedRows) -> Batch:
    """``struct batch``, which points into ``rows``."""
    facts = rows.first_rows, rows.num_rows, rows.lengths, rows.block_tables
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in facts)
    return Batch(
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
) -> None:
    """As ``paged_attention``, one sequence after the other."""
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
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hgnl,lhd->nhgd", weights, values).flatten(1, 2)
        out[first : first + count] = attended.to(out.dtype)


def _heads(kept: Tensor, column: int, num_kv_heads: int, dim: int) -> Tensor:
    return kept[:, column : column + num_kv_heads * dim].reshape(-1, num_kv_heads, dim)
