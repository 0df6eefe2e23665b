# KV rows: from a layer's projections to rotated queries and the rows that the cache keeps.
#   Grid       grouped: (T, tiles of heads); rotate: (T, tiles of heads); latent: (T,).
#   Layout     projections [T, heads, d], rows and heads may be strided; cos, sin [T, d] as
#              moesaic.models.layers.rope has them, negative sines at the first of each pair; cached
#              [tokens, width], row offsets[t] takes token t, or none does where offsets[t] is -1.
#   Cost       memory-bound: every projected number is read once and written once. Apart, the norm,
#              the rotation, the concatenation and the copy are six to nine launches.
#   Order      a norm's squares are added in float32, results are rounded once.
#   Reference  moesaic.kernels.kv_rows.
"""Norm, rotation and caching of queries, keys and values."""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # numbers a program works on


@triton.jit
def _pair(i, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns of pair ``i``, the first ``DIM`` of which are rotated; those behind go side by side."""
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    rotates = i < DIM // 2
    return tl.where(rotates, i, 2 * i), tl.where(rotates, i + DIM // 2, 2 * i + 1)


@triton.jit
def _turned(a, b, cos, sin, column_a, column_b, real):
    """The pairs ``(a, b)``, rotated where they are ``real``."""
    cos_a = tl.load(cos + column_a, mask=real, other=1.0).to(tl.float32)
    sin_a = tl.load(sin + column_a, mask=real, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + column_b, mask=real, other=1.0).to(tl.float32)
    sin_b = tl.load(sin + column_b, mask=real, other=0.0).to(tl.float32)
    return a * cos_a + b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _scale_of(row, eps, SIZE: tl.constexpr, SIZE_POW2: tl.constexpr):
    """The scale that norms ``SIZE`` numbers."""
    column = tl.arange(0, SIZE_POW2)
    x = tl.load(row + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


@triton.jit
def _grouped_kernel(
    qkv,
    qk_norm,
    cos,
    sin,
    offsets,
    queries,
    cached,
    qkv_stride,
    rotation_stride,
    cached_stride,
    eps,
    clip,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES_POW2: tl.constexpr,
    KEYS_POW2: tl.constexpr,
    CLIP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    real = (i < DIM // 2) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    column_a, column_b = _pair(i, ROTATED, INTERLEAVED)
    source = qkv + token * qkv_stride + head * DIM
    a = tl.load(source + column_a, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + column_b, mask=real, other=0.0).to(tl.float32)

    rotates = head < NUM_HEADS + NUM_KV_HEADS
    normed_a, normed_b = a, b
    if NORM:
        if WIDE:
            row = qkv + token * qkv_stride
            scale = _scale_of(row + NUM_HEADS * DIM, eps, NUM_KV_HEADS * DIM, KEYS_POW2)
            if NUM_HEADS > 0:
                of_queries = _scale_of(row, eps, NUM_HEADS * DIM, QUERIES_POW2)
                scale = tl.where(head < NUM_HEADS, of_queries, scale)
        else:
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / DIM + eps)[:, None]
        factor = qk_norm + head * DIM
        normed_a *= scale * tl.load(factor + column_a, mask=real & rotates, other=0.0)
        normed_b *= scale * tl.load(factor + column_b, mask=real & rotates, other=0.0)
    if CLIP:
        a, b = tl.clamp(a, -clip, clip), tl.clamp(b, -clip, clip)
        normed_a, normed_b = tl.clamp(normed_a, -clip, clip), tl.clamp(normed_b, -clip, clip)
    turned_a, turned_b = _turned(
        normed_a,
        normed_b,
        cos + token * rotation_stride,
        sin + token * rotation_stride,
        column_a,
        column_b,
        i < ROTATED // 2,
    )
    a = tl.where(rotates, turned_a, a).to(queries.dtype.element_ty)
    b = tl.where(rotates, turned_b, b).to(queries.dtype.element_ty)

    query = real & (head < NUM_HEADS)
    target = queries + (token * NUM_HEADS + head) * DIM
    tl.store(target + column_a, a, mask=query)
    tl.store(target + column_b, b, mask=query)
    offset = tl.load(offsets + token)
    kept = real & (head >= NUM_HEADS) & (offset >= 0)
    target = cached + offset * cached_stride + (head - NUM_HEADS) * DIM
    tl.store(target + column_a, a, mask=kept)
    tl.store(target + column_b, b, mask=kept)


@triton.jit
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    rotation_stride,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    real = (i < DIM // 2) & (head < NUM_HEADS)
    column_a, column_b = _pair(i, DIM, INTERLEAVED)
    source = x + token * token_stride + head * head_stride
    a = tl.load(source + column_a, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + column_b, mask=real, other=0.0).to(tl.float32)
    a, b = _turned(
        a,
        b,
        cos + token * rotation_stride,
        sin + token * rotation_stride,
        column_a,
        column_b,
        i < DIM // 2,
    )
    target = out + token * out_token_stride + head * out_head_stride
    tl.store(target + column_a, a.to(out.dtype.element_ty), mask=real)
    tl.store(target + column_b, b.to(out.dtype.element_ty), mask=real)


@triton.jit
def _latent_kernel(
    latent,
    norm,
    rope_key,
    cos,
    sin,
    offsets,
    cached,
    latent_stride,
    rope_stride,
    rotation_stride,
    cached_stride,
    eps,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offset = tl.load(offsets + token)
    if offset < 0:
        return
    target = cached + offset * cached_stride
    column = tl.arange(0, RANK_POW2)
    real = column < RANK
    x = tl.load(latent + token * latent_stride + column, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
    factor = tl.load(norm + column, mask=real, other=0.0).to(tl.float32)
    tl.store(target + column, (x * scale * factor).to(cached.dtype.element_ty), mask=real)

    i = tl.arange(0, PAIRS)
    real = i < DIM // 2
    column_a, column_b = _pair(i, DIM, INTERLEAVED)
    source = rope_key + token * rope_stride
    a = tl.load(source + column_a, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + column_b, mask=real, other=0.0).to(tl.float32)
    a, b = _turned(
        a,
        b,
        cos + token * rotation_stride,
        sin + token * rotation_stride,
        column_a,
        column_b,
        real,
    )
    tl.store(target + RANK + column_a, a.to(cached.dtype.element_ty), mask=real)
    tl.store(target + RANK + column_b, b.to(cached.dtype.element_ty), mask=real)


def store_grouped(
    qkv: Tensor,
    num_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: Tensor,
    cached: Tensor,
    *,
    is_wide: bool = False,
    clip: float | None = None,
) -> Tensor:
    """See ``moesaic.kernels.kv_rows``."""
    num_rows, all_heads, dim = qkv.shape
    num_kv_heads = (all_heads - num_heads) // 2
    assert qkv.stride(2) == cos.stride(1) == sin.stride(1) == cached.stride(1) == 1
    assert qkv.stride(1) == dim
    assert cos.stride(0) == sin.stride(0)
    queries = qkv.new_empty(num_rows, num_heads, dim)
    if not num_rows:
        return queries
    shape = _tile(all_heads, dim)
    _grouped_kernel[(num_rows, triton.cdiv(all_heads, shape["HEADS"]))](
        qkv,
        qkv if qk_norm is None else qk_norm,
        cos,
        sin,
        offsets,
        queries,
        cached,
        qkv.stride(0),
        cos.stride(0),
        cached.stride(0),
        eps,
        clip or 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        ROTATED=cos.shape[1],
        NORM=qk_norm is not None,
        WIDE=is_wide,
        QUERIES_POW2=triton.next_power_of_2(max(1, num_heads * dim)),
        KEYS_POW2=triton.next_power_of_2(num_kv_heads * dim),
        CLIP=clip is not None,
        INTERLEAVED=interleaved,
        **shape,
    )
    return queries


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> None:
    """See ``moesaic.kernels.kv_rows``."""
    num_rows, num_heads, dim = x.shape
    assert x.stride(2) == out.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert cos.stride(0) == sin.stride(0)
    if not num_rows:
        return
    shape = _tile(num_heads, dim)
    _rotate_kernel[(num_rows, triton.cdiv(num_heads, shape["HEADS"]))](
        x,
        cos,
        sin,
        out,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        INTERLEAVED=interleaved,
        **shape,
    )


def store_latent(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    rope_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: Tensor,
    cached: Tensor,
) -> None:
    """See ``moesaic.kernels.kv_rows``."""
    (num_rows, rank), dim = latent.shape, rope_key.shape[1]
    assert latent.stride(1) == rope_key.stride(1) == cos.stride(1) == cached.stride(1) == 1
    assert cos.stride(0) == sin.stride(0)
    if not num_rows:
        return
    _latent_kernel[(num_rows,)](
        latent,
        norm,
        rope_key,
        cos,
        sin,
        offsets,
        cached,
        latent.stride(0),
        rope_key.stride(0),
        cos.stride(0),
        cached.stride(0),
        eps,
        RANK=rank,
        RANK_POW2=triton.next_power_of_2(rank),
        DIM=dim,
        PAIRS=triton.next_power_of_2(max(1, dim // 2)),
        INTERLEAVED=interleaved,
    )


def _tile(num_heads: int, dim: int) -> dict[str, int]:
    pairs = triton.next_power_of_2(max(1, dim // 2))
    heads = min(triton.next_power_of_2(num_heads), max(1, _TILE // (2 * pairs)))
    return {"DIM": dim, "PAIRS": pairs, "HEADS": heads}
