"""Grouped experts against one expert at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.gated_mlp import PlainMLP
from moesaic.kernels.grouped_experts import grouped_experts
from tests.kernels.test_packed_experts import exact, random_case


def mlps_of(gate_up: torch.Tensor, down: torch.Tensor) -> list[PlainMLP]:
    return [PlainMLP(*weights) for weights in zip(gate_up, down, strict=True)]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
def test_it_equals_one_expert_at_a_time(
    seed: int, num_tokens: int, top_k: int, num_slots: int
) -> None:
    hidden, weights, slots, gate_up, down = random_case(seed, num_tokens, top_k, num_slots)

    combined = grouped_experts(hidden, weights, slots, mlps_of(gate_up, down))

    expected = exact((hidden, weights, slots, gate_up, down))
    torch.testing.assert_close(combined, expected.float(), atol=2e-5, rtol=1e-4)


def test_rows_without_an_expert_here_are_zero() -> None:
    hidden, weights, slots, gate_up, down = random_case(0, 5, 2, 3)
    slots[:] = -1
    assert not grouped_experts(hidden, weights, slots, mlps_of(gate_up, down)).any()

    slots[2, 1] = 0
    combined = grouped_experts(hidden, weights, slots, mlps_of(gate_up, down))

    assert combined.any(dim=1).tolist() == [False, False, True, False, False]


def test_shares_of_disjoint_holders_sum_to_the_whole() -> None:
    hidden, weights, slots, gate_up, down = random_case(1, 8, 4, 6)
    whole = grouped_experts(hidden, weights, slots, mlps_of(gate_up, down))

    shares = [
        grouped_experts(
            hidden, weights, slots.masked_fill(slots % 2 != holder, -1), mlps_of(gate_up, down)
        )
        for holder in (0, 1)
    ]

    torch.testing.assert_close(shares[0] + shares[1], whole, atol=1e-4, rtol=1e-5)


def test_the_order_of_a_rows_choices_does_not_matter() -> None:
    hidden, weights, slots, gate_up, down = random_case(2, 6, 4, 5)
    slots = torch.stack(
        [torch.randperm(5, generator=torch.Generator().manual_seed(i))[:4] for i in range(6)]
    )

    whole = grouped_experts(hidden, weights, slots, mlps_of(gate_up, down))
    turned = grouped_experts(hidden, weights.flip(1), slots.flip(1), mlps_of(gate_up, down))

    assert torch.equal(whole, turned)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_bfloat16_is_summed_in_float32(num_tokens: int) -> None:
    hidden, weights, slots, gate_up, down = random_case(3, num_tokens, 2, 3)

    combined = grouped_experts(
        hidden.bfloat16(), weights, slots, mlps_of(gate_up.bfloat16(), down.bfloat16())
    )

    assert combined.dtype == torch.float32
    assert combined.shape == hidden.shape
