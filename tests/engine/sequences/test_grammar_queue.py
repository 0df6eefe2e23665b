"""Tenants take turns to have grammars compiled, and a full queue makes room for those who have less in it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.grammar import MAX_WAITING, NUM_THREADS, GrammarQueue, Source
from moesaic.errors import NotReady, Overloaded
from moesaic.fairness import Claim


class Bench:
    """Compiles nothing, in an order that is noted, and only when it may."""

    def __init__(self) -> None:
        self.began: list[tuple[str, str]] = []
        self._may_end = threading.Semaphore(0)
        self.queue = GrammarQueue(self._compile)

    def _compile(self, source: Source, tenant: str) -> str:
        self.began.append((tenant, source[1]))
        self._may_end.acquire()
        if source[1] == "lost":
            raise NotReady("the helper was ended")
        return source[1].upper()

    def end(self, number: int = 10_000) -> None:
        """Let so many compilations come to their ends."""
        self._may_end.release(number)

    async def begun(self, number: int) -> list[tuple[str, str]]:
        """Wait until so many compilations have begun."""
        while len(self.began) < number:
            await asyncio.sleep(0)
        return self.began

    def ask(self, tenant: str, text: str, priority: int = 0) -> asyncio.Task[str]:
        claim = Claim(tenant, text, priority)
        return asyncio.create_task(self.queue.compiled(("regex", text), claim))


@contextmanager
def bench() -> Iterator[Bench]:
    one = Bench()
    try:
        yield one
    finally:
        one.end()


async def settled() -> None:
    """Let tasks that were just made get to their waits."""
    for _ in range(3):
        await asyncio.sleep(0)


def failures(tasks: list[asyncio.Task[str]]) -> list[BaseException]:
    return [e for task in tasks if task.done() and (e := task.exception()) is not None]


async def test_nobody_s_flood_has_another_s_grammars_refused_or_wait_for_it() -> None:
    with bench() as one:
        heavy = [one.ask("flood", f"heavy {i}") for i in range(40)]
        await settled()
        small = [one.ask("modest", f"small {i}") for i in range(12)]
        assert set(await one.begun(2)) == {("flood", "heavy 0"), ("modest", "small 0")}
        one.end()
        told = await asyncio.gather(*small)
        await asyncio.gather(*heavy, return_exceptions=True)

    assert told == [f"SMALL {i}" for i in range(12)]
    refused = failures(heavy)
    assert all(isinstance(error, Overloaded) for error in refused)
    assert len(refused) == 40 + 12 - NUM_THREADS - MAX_WAITING


async def test_one_tenant_has_one_grammar_compiled_at_a_time() -> None:
    with bench() as one:
        asked = [one.ask("a", f"{i}") for i in range(5)]
        await settled()
        asked.append(one.ask("b", "b"))
        assert sorted(await one.begun(NUM_THREADS)) == [("a", "0"), ("b", "b")]
        one.end()
        await asyncio.gather(*asked)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30)), max_size=120))
def test_a_tenant_with_less_than_an_equal_part_waiting_is_never_refused(
    asked: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        with bench() as one:
            tasks = [(tenant, one.ask(tenant, f"{n}")) for tenant, n in asked]
            await settled()
            one.end()
            await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
            for tenant in "abcd":
                if len({n for who, n in asked if who == tenant}) <= MAX_WAITING // 4:
                    assert not failures([task for who, task in tasks if who == tenant])
            for _, task in tasks:
                assert isinstance(task.exception(), Overloaded | None)

    asyncio.run(run())


async def test_requests_of_one_tenant_share_the_compilation_of_a_grammar() -> None:
    with bench() as one:
        asked = [one.ask("a", "same") for _ in range(MAX_WAITING * 3)]
        asked += [one.ask("b", "same") for _ in range(MAX_WAITING * 3)]
        await settled()
        one.end()
        told = await asyncio.gather(*asked)

    assert set(told) == {"SAME"}
    assert sorted(one.began) == [("a", "same"), ("b", "same")]


async def test_requests_that_leave_give_up_their_places() -> None:
    with bench() as one:
        first = one.ask("a", "first")
        left = [one.ask("a", f"{i}") for i in range(MAX_WAITING)]
        await settled()
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        stayed = [one.ask("a", f"again {i}") for i in range(MAX_WAITING)]
        await settled()
        one.end()
        await asyncio.gather(first, *stayed)

    assert [text for _, text in one.began] == ["first", *(f"again {i}" for i in range(MAX_WAITING))]


async def test_a_grammar_stays_in_the_queue_as_long_as_one_request_wants_it() -> None:
    with bench() as one:
        first, left, stays = one.ask("a", "first"), one.ask("a", "x"), one.ask("a", "x")
        await settled()
        left.cancel()
        await settled()
        one.end()
        assert await stays == "X"
        await first


async def test_work_that_puts_itself_behind_others_is_compiled_behind_them() -> None:
    with bench() as one:
        running = [one.ask("a", "running"), one.ask("b", "running")]
        await settled()
        asked = [one.ask("c", "batch", 1000), one.ask("d", "chat")]
        await one.begun(NUM_THREADS)
        one.end(1)
        assert (await one.begun(NUM_THREADS + 1))[-1] == ("d", "chat")
        one.end()
        await asyncio.gather(*running, *asked)


async def test_a_failure_is_of_one_grammar_alone() -> None:
    with bench() as one:
        lost, other = one.ask("a", "lost"), one.ask("a", "other")
        await settled()
        one.end()
        with pytest.raises(NotReady):
            await lost
        assert await other == "OTHER"
