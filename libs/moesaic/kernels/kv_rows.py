# KV rows: from a layer's projections to rotated queries and the rows that the cache keeps.
#   Layout     projections [T, heads, d], rows and heads may be strided; cos, sin [T, d] as
#              moesaic.models.rope has them, negative sines at the first of each pair; cached
#              [tokens, width], row slots[t] takes token t, or none does where slots[t] is -1.
"""Norm, rotation and caching of queries, keys and values: the choice of the kernel, and the reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.native.library import lib, usable


def store_grouped(
    qkv: Tensor,
    num_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    slots: Tensor,
    cached: Tensor,
    block_size: int,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to the cache, return the queries.

    Args:
        qkv: float32 or bfloat16 ``[T, heads + 2 kv_heads, d]``; on a CPU this changes it.
        num_heads: how many of them are queries.
        qk_norm: weights of the RMS norms of queries and keys, ``[heads + kv_heads, d]``, or None.
        eps: of those norms.
        cos: ``[T, d]``.
        sin: ``[T, d]``, the sign in it.
        interleaved: pairs are neighbours, not halves.
        slots: int64 ``[T]``: where each token's row goes, no two to the same; -1: nowhere.
        cached: ``[tokens, 2 kv_heads d]``. A row is a token, its keys and then its values; on a CPU the
            rows of a block lie together head by head, as its attention reads them: ``key_stride``.
        block_size: tokens a block.

    Returns:
        ``[T, heads, d]``, dtype of ``qkv``; on a CPU a part of it.
    """
    if qkv.is_cuda:
        from moesaic.kernels import kv_rows_triton as kernel

        return kernel.store_grouped(
            qkv, num_heads, qk_norm, eps, cos, sin, interleaved, slots, cached
        )
    if not usable(qkv):
        return store_grouped_reference(
            qkv, num_heads, qk_norm, eps, cos, sin, interleaved, slots, cached
        )
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_rows, all_heads, dim = qkv.shape
    lib().store_grouped(
        qkv.data_ptr(),
        num_rows,
        num_heads,
        (all_heads - num_heads) // 2,
        dim,
        None if qk_norm is None else qk_norm.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        None,
        interleaved,
        slots.data_ptr(),
        cached.data_ptr(),
        block_size,
        key_stride(block_size),
        torch.get_num_threads(),
    )
    return qkv[:, :num_heads]


def key_stride(block_size: int) -> int:
    """How far the numbers of a cached key lie apart on a CPU. Where blocks are whole vectors of tokens, that
    is from one dimension to the next: a query then meets as many keys at once as a vector has numbers."""
    return 1 if block_size % lib().vector_width() else block_size


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> None:
    """Rotate ``x`` ``[T, heads, d]`` into ``out``, which may be ``x`` itself."""
    if x.is_cuda:
        from moesaic.kernels import kv_rows_triton as kernel

        kernel.rotate(x, cos, sin, interleaved, out)
    elif not (usable(x) and usable(cos)):
        out.copy_(rotate_reference(x, cos, sin, interleaved))
    else:
        assert x.stride(2) == out.stride(2) == 1
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        lib().rotate_heads(
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            *x.shape,
            cos.data_ptr(),
            sin.data_ptr(),
            interleaved,
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
        )


def store_latent(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    rope_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    slots: Tensor,
    cached: Tensor,
) -> None:
    """Write the normed ``latent`` ``[T, rank]`` and the rotated ``rope_key`` ``[T, d]`` to the cache.

    The other arguments are as in ``store_grouped``; ``cached`` is ``[tokens, rank + d]``.
    """
    if latent.is_cuda:
        from moesaic.kernels import kv_rows_triton as kernel

        kernel.store_latent(latent, norm, eps, rope_key, cos, sin, interleaved, slots, cached)
    elif not usable(latent):
        store_latent_reference(latent, norm, eps, rope_key, cos, sin, interleaved, slots, cached)
    else:
        assert latent.stride(1) == rope_key.stride(1) == 1
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        lib().store_latent(
            latent.data_ptr(),
            latent.stride(0),
            norm.data_ptr(),
            eps,
            rope_key.data_ptr(),
            rope_key.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            interleaved,
            len(latent),
            latent.shape[1],
            rope_key.shape[1],
            slots.data_ptr(),
            cached.data_ptr(),
        )


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """What ``rotate`` writes, in float32."""
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
    slots: Tensor,
    cached: Tensor,
) -> Tensor:
    """As ``store_grouped``, in torch's own operations; leaves ``qkv`` as it is."""
    num_rotated = (num_heads + qkv.shape[1]) // 2
    qk = qkv[:, :num_rotated].float()
    if qk_norm is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], eps=eps) * qk_norm.float()
    qk = rotate_reference(qk, cos, sin, interleaved).to(qkv.dtype)
    kept = slots >= 0
    cached[slots[kept], : cached.shape[1] // 2] = qk[kept, num_heads:].flatten(1)
    cached[slots[kept], cached.shape[1] // 2 :] = qkv[kept, num_rotated:].flatten(1)
    return qk[:, :num_heads]


def store_latent_reference(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    rope_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    slots: Tensor,
    cached: Tensor,
) -> None:
    """As ``store_latent``, in torch's own operations."""
    rank = latent.shape[1]
    normed = F.rms_norm(latent.float(), latent.shape[-1:], norm.float(), eps)
    kept = slots >= 0
    cached[slots[kept], :rank] = normed[kept].to(cached.dtype)
    turned = rotate_reference(rope_key.unsqueeze(1), cos, sin, interleaved).squeeze(1)
    cached[slots[kept], rank:] = turned[kept].to(cached.dtype)
