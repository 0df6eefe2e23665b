"""The CPU's kernels of what lies between the products, against torch's own operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels import kv_rows
from moesaic.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from tests.kernels.kept_blocks import by_head

pytestmark = pytest.mark.usefixtures("native")
EPS = 1e-6


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=2e-5)


def rotation(num_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_rows, dim), torch.randn(num_rows, dim)


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(1, 600))
def test_a_sum_and_its_norm(num_rows: int, width: int) -> None:
    x, delta, weight = (
        torch.randn(num_rows, width),
        torch.randn(num_rows, width),
        torch.randn(width),
    )

    summed, normed = add_rms_norm(x, delta, weight, EPS)

    expected_sum, expected = add_rms_norm_reference(x, delta, weight, EPS)
    assert torch.equal(summed, expected_sum)
    close(normed, expected)
    assert torch.equal(rms_norm(summed, weight, EPS), normed)


def test_rows_of_a_wider_tensor_are_normed() -> None:
    wide, weight = torch.randn(9, 50), torch.randn(20)

    close(rms_norm(wide[:, 7:27], weight, EPS), rms_norm(wide[:, 7:27].clone(), weight, EPS))


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(0, 40),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 40),
    norm=st.booleans(),
    interleaved=st.booleans(),
    block_size=st.sampled_from([4, 8, 16, 32]),
    less=st.sampled_from([0, 0, 1, 7]),
    wide=st.booleans(),
    clip=st.sampled_from([None, 0.7]),
)
def test_grouped_rows(
    num_rows: int, num_kv_heads: int, group: int, half: int, norm: bool, interleaved: bool,
    block_size: int, less: int, wide: bool, clip: float | None,
) -> None:  # fmt: skip
    num_heads, dim, rotated = group * num_kv_heads, 2 * half, 2 * max(1, half - less)
    qkv = torch.randn(num_rows, num_heads + 2 * num_kv_heads, dim)
    qk_norm = torch.randn(num_heads + num_kv_heads, dim) if norm else None
    turn = (*rotation(num_rows, rotated), interleaved)
    offsets = torch.randperm(64)[:num_rows]
    offsets[num_rows // 2 :][:1] = -1  # one is not kept
    reference, cached = torch.zeros(2, 64, 2 * num_kv_heads * dim)
    expected = kv_rows.store_grouped_reference(
        qkv, num_heads, qk_norm, EPS, *turn, offsets, reference, is_wide=wide, clip=clip
    )

    queries = kv_rows.store_grouped(
        *(qkv.clone(), num_heads, qk_norm, EPS, *turn, offsets, cached, block_size),
        is_wide=wide,
        clip=clip,
    )

    close(queries, expected)
    close(cached, by_head(reference, num_kv_heads, block_size))


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 80), st.integers(1, 20), st.booleans())
def test_latent_rows(num_rows: int, rank: int, half: int, interleaved: bool) -> None:
    dim = 2 * half
    latent, rope_key = torch.randn(num_rows, rank + dim).split([rank, dim], dim=1)
    norm, turn = torch.randn(rank), (*rotation(num_rows, dim), interleaved)
    offsets = torch.randperm(num_rows + 5)[:num_rows]
    offsets[num_rows // 2 :][:1] = -1
    expected, cached = torch.zeros(2, num_rows + 5, rank + dim)
    kv_rows.store_latent_reference(latent, norm, EPS, rope_key, *turn, offsets, expected)

    kv_rows.store_latent(latent, norm, EPS, rope_key, *turn, offsets, cached)

    close(cached, expected)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_heads_are_rotated_in_place_and_elsewhere(
    num_rows: int, heads: int, half: int, interleaved: bool
) -> None:
    wide, turn = torch.randn(num_rows, heads, 2 * half + 7), rotation(num_rows, 2 * half)
    before, out = wide.clone(), torch.zeros(num_rows, heads, 2 * half)
    expected = kv_rows.rotate_reference(before[..., 7:], *turn, interleaved)

    kv_rows.rotate(wide[..., 7:], *turn, interleaved, out)
    kv_rows.rotate(wide[..., 7:], *turn, interleaved, wide[..., 7:])

    close(out, expected)
    assert torch.equal(wide[..., 7:], out)
    assert torch.equal(wide[..., :7], before[..., :7])
