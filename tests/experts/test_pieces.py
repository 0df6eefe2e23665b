"""Pieces of experts: every message is whole pieces, and every damaged byte of one is found."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.experts import pieces
from moesaic.experts.pull import ranges


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(ranges, "MOST_EXPERTS", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_messages_are_whole_pieces_and_a_flipped_bit_is_found(data: Any) -> None:
    num_experts, row_bytes = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 200))
    rows = torch.randint(0, 256, (num_experts, row_bytes), dtype=torch.uint8)
    digests, everything = pieces.digests_of(rows), rows.flatten()

    runs = ranges.messages_of(len(everything), row_bytes)

    assert [start for start, _ in runs] == [0, *(sum(run) for run in runs[:-1])]
    assert sum(runs[-1]) == len(everything)
    told = [pieces.pieces_of(start, length, row_bytes) for start, length in runs]
    assert [piece for those in told for piece in those] == list(range(digests.numel()))
    start, length = data.draw(st.sampled_from(runs))
    assert length <= min(64, 3 * row_bytes)
    part = everything[start : start + length].clone()
    own = digests.flatten()[list(pieces.pieces_of(start, length, row_bytes) or ())]
    assert pieces.is_as_digested(part, start, row_bytes, own)
    part[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not pieces.is_as_digested(part, start, row_bytes, own)


def test_what_cuts_a_piece_is_no_pieces() -> None:
    assert pieces.pieces_of(0, 150, 150) == range(0, 3)
    assert pieces.pieces_of(128, 22 + 64, 150) == range(2, 4)
    assert pieces.pieces_of(1, 63, 150) is None
    assert pieces.pieces_of(64, 63, 150) is None
