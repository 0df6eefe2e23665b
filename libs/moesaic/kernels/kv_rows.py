# KV rows: from a layer's projections to rotated queries and the rows that the cache keeps.
#   Layout     projections [T, heads, d], rows and heads may be strided; cos, sin [T, d] as
#              moesaic.models.layers.rope has them, negative sines at the first of each pair; cached
#              [tokens, width], row offsets[t] takes token t, or none does where offsets[t] is -1.
"""Norm, rotation and caching of queries, keys and values: the choice of the kernel, and the reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.native.library import lib, usable


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
    block_size: int,
    *,
    is_wide: bool = False,
    clip: float | None = None,
) -> Tensor:
    """Norm, bound and rotate queries and keys, write keys and values to the cache, return the queries.

    Args:
        qkv: float32 or bfloat16 ``[T, heads + 2 kv_heads, d]``; on a CPU this changes it.
        num_heads: how many of them are queries.
        qk_norm: weights of the RMS norms of queries and keys, ``[heads + kv_heads, d]``, or None.
        eps: epsilon of those norms.
        cos: ``[T, r]``, of the numbers of each head that are rotated, the first.
        sin: ``[T, r]``, the sign in it.
        interleaved: pairs are neighbours, not halves.
        offsets: int64 ``[T]``: where each token's row goes, no two to the same; -1: nowhere.
        cached: ``[tokens, 2 kv_heads d]``. A row is a token, its keys and then its values; on a CPU the
            rows of a block lie together head by head, as its attention reads them: ``key_stride``.
        block_size: tokens a block.
        is_wide: the norms are over all queries of a row, and all keys, together; not head by head.
        clip: bound of queries, keys and values, after the norms; None: there is none.

    Returns:
        ``[T, heads, d]``, dtype of ``qkv``; on a CPU a part of it.
    """
    if qkv.is_cuda:
        from moesaic.kernels.triton import kv_rows as kernel

        return kernel.store_grouped(
            *(qkv, num_heads, qk_norm, eps, cos, sin, interleaved, offsets, cached),
            is_wide=is_wide,
            clip=clip,
        )
    if not (usable(qkv) and usable(cos)):
        return store_grouped_reference(
            *(qkv, num_heads, qk_norm, eps, cos, sin, interleaved, offsets, cached),
            is_wide=is_wide,
            clip=clip,
        )
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_rows, all_heads, dim = qkv.shape
    lib().store_grouped(
        qkv=qkv.data_ptr(),
        count=num_rows,
        heads=num_heads,
        kv_heads=(all_heads - num_heads) // 2,
        dim=dim,
        qk_norm=None if qk_norm is None else qk_norm.data_ptr(),
        is_wide=is_wide,
        eps=eps,
        clip=clip or 0.0,
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        rotated=cos.shape[1],
        positions=None,
        interleaved=interleaved,
        offsets=offsets.data_ptr(),
        cache=cached.data_ptr(),
        block_size=block_size,
        key_stride=key_stride(block_size),
        threads=torch.get_num_threads(),
    )
    return qkv[:, :num_heads]


def key_stride(block_size: int) -> int:
    """Return the distance between the numbers of a cached key on a CPU.

    If blocks are whole vectors of tokens, keys lie dimension by dimension: a query then meets as many
    keys at once as a vector has numbers.
    """
    return 1 if block_size % lib().vector_width() else block_size


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> None:
    """Rotate ``x`` ``[T, heads, d]`` into ``out``, which may be ``x`` itself."""
    if x.is_cuda:
        from moesaic.kernels.triton import kv_rows as kernel

        kernel.rotate(x, cos, sin, interleaved, out)
    elif not (usable(x) and usable(cos)):
        out.copy_(rotate_reference(x, cos, sin, interleaved))
    else:
        assert x.stride(2) == out.stride(2) == 1
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        num_rows, num_heads, dim = x.shape
        lib().rotate_heads(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            count=num_rows,
            heads=num_heads,
            dim=dim,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            interleaved=interleaved,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_head_stride=out.stride(1),
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
    """Write the normed ``latent`` ``[T, rank]`` and the rotated ``rope_key`` ``[T, d]`` to the cache.

    The other arguments are as in ``store_grouped``; ``cached`` is ``[tokens, rank + d]``.
    """
    if latent.is_cuda:
        from moesaic.kernels.triton import kv_rows as kernel

        kernel.store_latent(latent, norm, eps, rope_key, cos, sin, interleaved, offsets, cached)
    elif not usable(latent):
        store_latent_reference(latent, norm, eps, rope_key, cos, sin, interleaved, offsets, cached)
    else:
        assert latent.stride(1) == rope_key.stride(1) == 1
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        lib().store_latent(
            latent=latent.data_ptr(),
            latent_stride=latent.stride(0),
            weight=norm.data_ptr(),
            eps=eps,
            key=rope_key.data_ptr(),
            key_stride=rope_key.stride(0),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            interleaved=interleaved,
            count=len(latent),
            rank=latent.shape[1],
            rope=rope_key.shape[1],
            offsets=offsets.data_ptr(),
            cache=cached.data_ptr(),
        )


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate as ``rotate`` does, in float32."""
    x = x.float()
    half = x.shape[-1] // 2
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    swapped = pairs.flip(-1 if interleaved else -2).flatten(-2)
    return x * cos.float().unsqueeze(1) + swapped * sin.float().unsqueeze(1)


def store_grouped_reference(
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
    """Compute as ``store_grouped``, in torch's own operations; leaves ``qkv`` as it is."""
    num_kv_heads, rotated = (qkv.shape[1] - num_heads) // 2, cos.shape[1]
    qk, values = torch.split(qkv.float(), [num_heads + num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        kinds = torch.split(qk, [num_heads, num_kv_heads], dim=1)
        normed = [
            F.rms_norm(own, own.shape[1:] if is_wide else own.shape[2:], eps=eps) for own in kinds
        ]
        qk = torch.cat(normed, dim=1) * qk_norm.float()
    if clip is not None:
        qk, values = qk.clamp(-clip, clip), values.clamp(-clip, clip)
    turned = rotate_reference(qk[..., :rotated], cos, sin, interleaved)
    qk = torch.cat((turned, qk[..., rotated:]), dim=-1).to(qkv.dtype)
    kept = offsets >= 0
    cached[offsets[kept], : cached.shape[1] // 2] = qk[kept, num_heads:].flatten(1)
    cached[offsets[kept], cached.shape[1] // 2 :] = values[kept].flatten(1).to(qkv.dtype)
    return qk[:, :num_heads]


def store_latent_reference(
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
    """Compute as ``store_latent``, in torch's own operations."""
    rank = latent.shape[1]
    normed = F.rms_norm(latent.float(), latent.shape[-1:], norm.float(), eps)
    kept = offsets >= 0
    cached[offsets[kept], :rank] = normed[kept].to(cached.dtype)
    turned = rotate_reference(rope_key.unsqueeze(1), cos, sin, interleaved).squeeze(1)
    cached[offsets[kept], rank:] = turned[kept].to(cached.dtype)
