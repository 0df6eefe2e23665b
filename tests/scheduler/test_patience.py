"""Patience with workers that load, on a clock that the test sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import PeerLost
from moesaic.services.scheduler.epochs.patience import FLOOR_BYTES_PER_S, STALLED_S, Patience
from moesaic.v1.admin_pb2 import Loading


@given(
    steps=st.lists(st.tuples(st.floats(0.1, STALLED_S - 1), st.integers(1, 1 << 30)), max_size=40)
)
def test_a_worker_that_is_faster_than_the_floor_is_never_given_up(
    steps: list[tuple[float, int]],
) -> None:
    total = sum(max(size, int(seconds * FLOOR_BYTES_PER_S) + 1) for seconds, size in steps)
    patience, now_s, done = Patience("w", 1.0, 1.0, 0.0), 0.0, 0
    patience.note(Loading(done_bytes=0, total_bytes=total + 1), now_s)
    for seconds, size in steps:
        now_s += seconds
        done += max(size, int(seconds * FLOOR_BYTES_PER_S) + 1)
        patience.note(Loading(done_bytes=done, total_bytes=total + 1), now_s)


def test_a_stalled_worker_is_given_up_and_named() -> None:
    patience = Patience("expert-1", 120.0, 1.0, 0.0)
    patience.note(Loading(done_bytes=5, total_bytes=10**12), 10.0)
    patience.note(Loading(done_bytes=5, total_bytes=10**12), 10.0 + STALLED_S)
    with pytest.raises(PeerLost, match=r"expert-1: loading has stalled: no byte for 60 s, 5 of"):
        patience.note(Loading(done_bytes=5, total_bytes=10**12), 10.1 + STALLED_S)


def test_one_that_says_nothing_has_the_least_time_and_a_share_more_of_it() -> None:
    patience = Patience("w", 2.0, 0.5, 0.0)
    patience.note(None, 3.9)
    with pytest.raises(PeerLost, match="has not loaded within 4 s"):
        patience.note(None, 4.1)


def test_one_below_the_floor_is_given_up() -> None:
    patience, total = Patience("w", 1.0, 1.0, 0.0), int(100 * FLOOR_BYTES_PER_S)
    for second in range(0, 101):
        patience.note(Loading(done_bytes=second, total_bytes=total), float(second))
    with pytest.raises(PeerLost, match=f"{total} bytes are there"):
        patience.note(Loading(done_bytes=102, total_bytes=total), 101.1)
