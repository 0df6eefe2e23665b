"""Norm, rotation and caching against their references, and those against the models' rotation."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels import kv_rows
from moesaic.kernels.triton import kv_rows as kernels
from moesaic.models.configuration.architecture import Rope
from moesaic.models.layers.rope import RotaryEmbedding

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def rotation(num_rows: int, dim: int, interleaved: bool, device: torch.device) -> list[Tensor]:
    embedding = RotaryEmbedding(Rope(1e4, None), dim, interleaved=interleaved, device=device)
    made = embedding.rotation(torch.arange(num_rows, device=device) * 37, torch.float32)
    return [made.cos, made.sin]


def close(got: Tensor, expected: Tensor) -> None:
    """Both are rounded once, from float32 values that may differ in their last bits."""
    rtol = 1e-5 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=rtol)


def check_grouped(
    num_rows: int, num_heads: int, num_kv_heads: int, dim: int, norm: bool, interleaved: bool,
    dtype: torch.dtype, device: torch.device, rotated: int | None = None, **options: Any,
) -> None:  # fmt: skip
    all_heads = num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_rows, all_heads, dim, device=device).to(dtype)
    weights = torch.randn(num_heads + num_kv_heads, dim, device=device).to(dtype)
    qk_norm = weights if norm else None
    turn = (*rotation(num_rows, rotated or dim, interleaved, device), interleaved)
    offsets = torch.randperm(num_rows + 5, device=device)[:num_rows]
    offsets[num_rows // 2 :][:1] = -1  # one is not kept
    cached = torch.randn(num_rows + 5, 2 * num_kv_heads * dim, device=device).to(dtype)
    expected = cached.clone()

    rows = qkv, num_heads, qk_norm, EPS, *turn, offsets
    queries = kernels.store_grouped(*rows, cached, **options)

    close(queries, kv_rows.store_grouped_reference(*rows, expected, **options))
    close(cached, expected)


def check_latent(
    num_rows: int, rank: int, dim: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    down = torch.randn(num_rows, rank + dim, device=device).to(dtype)
    latent, rope_key = down[:, :rank], down[:, rank:]
    norm = torch.randn(rank, device=device).to(dtype)
    turn = (*rotation(num_rows, dim, interleaved, device), interleaved)
    offsets = torch.randperm(num_rows + 5, device=device)[:num_rows]
    offsets[num_rows // 2 :][:1] = -1  # one is not kept
    cached = torch.randn(num_rows + 5, rank + dim, device=device).to(dtype)
    expected = cached.clone()

    kernels.store_latent(latent, norm, EPS, rope_key, *turn, offsets, cached)

    kv_rows.store_latent_reference(latent, norm, EPS, rope_key, *turn, offsets, expected)
    close(cached, expected)


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 9),
    norm=st.booleans(),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    less=st.sampled_from([0, 0, 1, 4]),
    wide=st.booleans(),
    clip=st.sampled_from([None, 0.7]),
)
def test_grouped_rows_equal_the_reference(
    device: torch.device, num_rows: int, num_kv_heads: int, group: int, half: int, norm: bool,
    interleaved: bool, dtype: torch.dtype, less: int, wide: bool, clip: float | None,
) -> None:  # fmt: skip
    check_grouped(
        *(num_rows, group * num_kv_heads, num_kv_heads, 2 * half, norm, interleaved, dtype, device),
        rotated=2 * max(1, half - less),
        is_wide=wide,
        clip=clip,
    )


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    rank=st.integers(1, 40),
    half=st.integers(1, 9),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_latent_rows_equal_the_reference(
    device: torch.device, num_rows: int, rank: int, half: int, interleaved: bool, dtype: torch.dtype
) -> None:
    check_latent(num_rows, rank, 2 * half, interleaved, dtype, device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated_in_place_as_the_models_rotate_them(
    device: torch.device, dtype: torch.dtype, interleaved: bool
) -> None:
    heads = torch.randn(5, 6, 40, device=device).to(dtype)
    before = heads.clone()
    embedding = RotaryEmbedding(Rope(1e4, None), 12, interleaved=interleaved, device=device)
    made = embedding.rotation(torch.arange(5, device=device), torch.float32)
    pairs = before[..., 28:].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(a, b) * torch.exp(
        1j
        * torch.outer(torch.arange(5), 1e4 ** (-torch.arange(0, 12, 2) / 12)).double().unsqueeze(1)
    ).to(device)
    expected = (
        torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2).to(dtype)
    )

    part = heads[..., 28:]
    kernels.rotate(part, made.cos, made.sin, interleaved, part)

    close(heads[..., 28:], expected)
    assert torch.equal(heads[..., :28], before[..., :28])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_equal_the_reference_at_a_models_size(num_rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    check_grouped(num_rows, 32, 4, 128, True, False, dtype, device)
    check_grouped(num_rows, 64, 8, 64, False, False, dtype, device)
    check_grouped(num_rows, 48, 8, 128, True, False, dtype, device, rotated=64, is_wide=True)
    check_grouped(num_rows, 16, 16, 128, True, False, dtype, device, is_wide=True, clip=8.0)
    check_latent(num_rows, 512, 64, True, dtype, device)
