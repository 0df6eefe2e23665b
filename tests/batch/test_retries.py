import pytest

from moesaic.batch.retries import LONGEST_WAIT_S, retry_wait_s


@pytest.mark.parametrize("status", [None, 429, 502, 503, 504, 529])
def test_what_a_retry_can_help_waits_longer_each_time(status: int | None) -> None:
    waits = [retry_wait_s(tries, status, None, None) for tries in range(1, 2000, 3)]

    assert waits[:2] == [0.5, 4.0]
    assert waits[-1] == LONGEST_WAIT_S


@pytest.mark.parametrize("status", [200, 400, 404, 413, 500])
def test_what_a_retry_cannot_help_is_not_asked_again(status: int) -> None:
    assert retry_wait_s(1, status, "1", None) is None


def test_the_server_decides_where_it_says_so() -> None:
    assert retry_wait_s(1, 503, "1", "false") is None
    assert retry_wait_s(1, 500, "1", "true") == 1.0


@pytest.mark.parametrize(
    ("asked", "waits"),
    [("0", 0.0), ("7", 7.0), ("9999", 30.0), ("-1", 0.5), ("nan", 0.5), ("x", 0.5)],
)
def test_the_wait_that_the_server_asks_for_is_kept_within_reason(asked: str, waits: float) -> None:
    assert retry_wait_s(1, 503, asked, "true") == waits
