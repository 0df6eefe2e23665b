import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.batch.answering import HELD_PER_REQUEST, InOrder, answer_all
from moesaic.batch.requests import BadLine, BatchRequest, Line
from moesaic.batch.results import Result, unanswered


def request(number: int) -> BatchRequest:
    return BatchRequest(number, f"r{number}", "/v1/classify", b"{}")


def result(number: int) -> Result:
    return unanswered(f"r{number}", "test", "a test")


@given(st.permutations(range(12)))
def test_results_come_out_in_order_as_soon_as_none_is_missing(order: list[int]) -> None:
    ordered, given_out, come = InOrder(), [], set()

    for index in order:
        ordered.put(index, result(index))
        come.add(index)
        given_out += ordered.take()

        first_missing = next(i for i in range(13) if i not in come)
        assert [r.custom_id for r in given_out] == [f"r{i}" for i in range(first_missing)]


async def test_every_line_gets_its_result_whatever_takes_how_long() -> None:
    chance, written, running, most = random.Random(3), [], 0, 0
    together = asyncio.Barrier(7)

    async def ask(asked: BatchRequest) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if asked.number < 7:
            await together.wait()
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        running -= 1
        return result(asked.number)

    lines: list[Line] = [request(n) for n in range(200)]
    lines[50] = BadLine(50, "r50", "invalid_url", "bad")
    await answer_all(iter(lines), ask, written.extend, 7)

    assert [r.custom_id for r in written] == [f"r{n}" for n in range(200)]
    assert written[50].error.code == "invalid_url"
    assert most == 7


async def test_behind_a_slow_request_no_more_than_the_window_is_held_back() -> None:
    release, asked_last, taken = asyncio.Event(), asyncio.Event(), 0

    def lines() -> Iterator[Line]:
        nonlocal taken
        for taken in range(1, 1000):
            yield request(taken)

    async def ask(asked: BatchRequest) -> Result:
        if asked.number == 1:
            await release.wait()
        if asked.number == 2 * HELD_PER_REQUEST:
            asked_last.set()
        return result(asked.number)

    written: list[Result] = []
    answering = asyncio.create_task(answer_all(lines(), ask, written.extend, 2))
    await asked_last.wait()
    # Whoever went on would read the next lines in a thread, as this does.
    for _ in range(3):
        await asyncio.to_thread(int)

    assert taken == 2 * HELD_PER_REQUEST
    assert written == []
    release.set()
    await answering
    assert len(written) == 999


async def test_an_error_while_writing_ends_everything() -> None:
    def write(results: Sequence[Result]) -> None:
        raise OSError("disk full")

    async def ask(asked: BatchRequest) -> Result:
        return result(asked.number)

    with pytest.raises(ExceptionGroup) as caught:
        await answer_all(map(request, range(100)), ask, write, 4)

    assert caught.group_contains(OSError, match="disk full")


async def test_a_write_under_way_is_finished_before_a_cancelled_run_is_over() -> None:
    import threading

    begun, go_on, written = threading.Event(), threading.Event(), []

    def write(results: Sequence[Result]) -> None:
        begun.set()
        go_on.wait(60)
        written.extend(results)

    async def ask(asked: BatchRequest) -> Result:
        return result(asked.number)

    running = asyncio.create_task(answer_all(map(request, range(1)), ask, write, 1))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        running.cancel()
        for _ in range(10):
            await asyncio.sleep(0)

    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(written) == 1
