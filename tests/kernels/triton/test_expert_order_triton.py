"""The sorting of choices by slot against its reference."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels.triton.expert_order import ExpertOrder, expert_order, max_blocks


def expert_order_reference(slot_ids: torch.Tensor, num_slots: int, block_rows: int) -> ExpertOrder:
    """Sort as ``expert_order``, one choice at a time; undefined elements are -1."""
    num_blocks = max_blocks(slot_ids.numel(), num_slots, block_rows)
    slots, rows = torch.full((num_blocks,), -1), torch.zeros(num_blocks, dtype=torch.int64)
    choice_of_row = torch.full((num_blocks * block_rows,), -1)
    row_of_choice = torch.full((slot_ids.numel(),), -1)
    block = 0
    for slot in range(num_slots):
        choices = (slot_ids.flatten() == slot).nonzero().flatten()
        for part in choices.split(block_rows):
            if len(part):
                slots[block], rows[block] = slot, len(part)
                row_of_choice[part] = block * block_rows + torch.arange(len(part))
                choice_of_row[row_of_choice[part]] = part
                block += 1
    parts = (tensor.int() for tensor in (slots, rows, choice_of_row, row_of_choice))
    return ExpertOrder(block_rows, *parts)


def check(slot_ids: torch.Tensor, num_slots: int, block_rows: int, device: torch.device) -> None:
    order = expert_order(slot_ids.to(device), num_slots, block_rows)

    expected = expert_order_reference(slot_ids, num_slots, block_rows)
    for name in ("slot_of_block", "rows_of_block", "row_of_choice"):
        assert torch.equal(getattr(order, name).cpu(), getattr(expected, name)), name
    defined = expected.choice_of_row >= 0
    assert torch.equal(order.choice_of_row.cpu()[defined], expected.choice_of_row[defined])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_choices=st.integers(0, 40),
    num_slots=st.integers(1, 40),
    lowest=st.integers(-1, 3),
    block_rows=st.sampled_from([16, 64]),
)
@example(seed=0, num_choices=1100, num_slots=3, lowest=-1, block_rows=16)  # several chunks
@example(seed=0, num_choices=513, num_slots=300, lowest=0, block_rows=16)  # many blocks
def test_every_choice_has_its_row_in_a_block_of_its_slot(
    device: torch.device, seed: int, num_choices: int, num_slots: int, lowest: int, block_rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Above the slots lie some that do not exist, below them -1: neither is held here.
    slot_ids = torch.randint(lowest, num_slots + 4, (num_choices,), generator=generator)
    check(slot_ids, num_slots, block_rows, device)


def test_nothing_held_here_needs_no_block(device: torch.device) -> None:
    order = expert_order(torch.full((5, 2), -1, device=device), 4, 16)

    assert set(order.slot_of_block.tolist()) == {-1}
    assert set(order.rows_of_block.tolist()) == {0}
    assert set(order.row_of_choice.tolist()) == {-1}


@pytest.mark.gpu
@pytest.mark.parametrize("num_choices", [1, 8, 512, 4096, 65536])
@pytest.mark.parametrize("num_slots", [8, 60, 128, 272])
@pytest.mark.parametrize("block_rows", [16, 128])
def test_it_sorts_a_models_choices(num_choices: int, num_slots: int, block_rows: int) -> None:
    slot_ids = (torch.randn(num_choices).abs() * num_slots / 3).long() - 1  # a few are popular
    check(slot_ids, num_slots, block_rows, torch.device("cuda"))
