"""Experts in the slots of an expert worker read as they were packed."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import ExpertUnavailable
from moesaic.experts import pieces
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pull.shard import SlotShard


def loaded(packed: torch.Tensor, expert: int) -> LoadedExpert:
    """An expert of which only the bytes matter, and their digests."""
    digests = torch.tensor([100 * expert + n for n in range(pieces.num_pieces(len(packed)))])
    return LoadedExpert(mlp=None, packed=packed, digests=digests)  # type: ignore[arg-type]


@given(st.data())
def test_any_part_of_a_layer_reads_as_its_experts_were_packed(data: st.DataObject) -> None:
    row_bytes = data.draw(st.integers(1, 200))
    packed = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8)
    shard = SlotShard(lambda _, expert: loaded(packed[expert], expert), row_bytes)
    start = data.draw(st.integers(0, packed.numel() - 1))
    length = data.draw(st.integers(1, packed.numel() - start))

    assert torch.equal(shard.read(0, start, length), packed.flatten()[start : start + length])


def test_reading_experts_leaves_no_threads_behind() -> None:
    rows = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    shard = SlotShard(lambda _, expert: loaded(rows[expert], expert), 1 << 20)

    def read() -> int:  # as the thread that gives experts does, which stays
        usual = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            before = len(os.listdir("/proc/self/task"))
            shard.read(0, 1 << 19, 1 << 20)
            return len(os.listdir("/proc/self/task")) - before
        finally:
            torch.set_num_threads(usual)

    with ThreadPoolExecutor(1) as giver:
        assert giver.submit(read).result() == 0


def test_a_slot_that_is_empty_is_a_typed_error() -> None:
    shard = SlotShard(lambda layer, expert: None, 64)

    with pytest.raises(ExpertUnavailable):
        shard.read(1, 7 * 64, 64)
