import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.cluster.waiting import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.1, 2.0, jitter=(1.0, 1.0))

    pauses = [backoff.next_pause_s() for _ in range(7)]
    backoff.reset()

    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert backoff.next_pause_s() == pytest.approx(0.1)


@given(st.integers(0, 20))
def test_jitter_stays_within_its_range(num_failures: int) -> None:
    backoff, plain = Backoff(0.1, 2.0), Backoff(0.1, 2.0, jitter=(1.0, 1.0))

    for _ in range(num_failures):
        assert 0.5 <= backoff.next_pause_s() / plain.next_pause_s() <= 1.0


async def test_a_pause_takes_its_time() -> None:
    await Backoff(0.0, 0.0).pause()
