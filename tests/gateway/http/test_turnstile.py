"""Requests begin one in each round of the loop, tenants in turn. The test and the turnstile see the loop's rounds
from different places in it, so that what began one after the other may be two in what the test calls a round."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.http.turnstile import Turnstile


def begin(arrivals: list[list[str]], leaving: frozenset[int] = frozenset()) -> list[list[str]]:
    """Who begins in each round, if these tenants' requests arrive in the first ones. Those whose number is in
    ``leaving`` are given up by their clients before."""

    async def go() -> list[list[str]]:
        turnstile, begun = Turnstile(), [[]]

        async def request(tenant: str) -> None:
            await turnstile.turn(tenant)
            begun[-1].append(tenant)

        tasks: list[asyncio.Task[None]] = []
        while len(begun) <= len(arrivals) or not all(task.done() for task in tasks):
            if len(begun) <= len(arrivals):
                tasks += [
                    asyncio.create_task(request(tenant)) for tenant in arrivals[len(begun) - 1]
                ]
                for number in leaving & set(range(len(tasks))):
                    if not tasks[number].done():
                        asyncio.get_running_loop().call_soon(tasks[number].cancel)
            await asyncio.sleep(0)
            begun.append([])
            assert len(begun) < 1000, "somebody waits for ever"
        return begun

    return asyncio.run(go())


def order(rounds: list[list[str]]) -> str:
    return "".join(tenant for one in rounds for tenant in one)


def test_where_nobody_waits_a_request_begins_at_once() -> None:
    turnstile = Turnstile()
    turn = turnstile.turn("a")

    async def go() -> None:
        try:
            turn.send(None)
        except StopIteration:
            return
        raise AssertionError("it had to wait")

    asyncio.run(go())


def test_a_tenants_next_request_begins_before_the_rest_of_anothers() -> None:
    assert order(begin([["a"] * 50, ["b"]])).index("b") <= 4


def test_tenants_take_turns() -> None:
    together = order(begin([["a"] * 9 + ["b"] * 9]))

    assert all(abs(together[:n].count("a") - together[:n].count("b")) <= 2 for n in range(18))


def test_after_those_who_waited_the_next_does_not_have_to() -> None:
    rounds = begin([["a"] * 3, [], [], [], [], [], [], ["b"]])

    assert order(rounds) == "aaab"
    assert rounds.index(["b"]) <= 8, "its task began in the eighth"


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=12), max_size=6),
    st.frozensets(st.integers(0, 40), max_size=6),
)
def test_everyone_begins_once_and_one_at_a_time(
    arrivals: list[list[str]], leaving: frozenset[int]
) -> None:
    rounds = begin(arrivals, leaving)

    asked = [tenant for one in arrivals for tenant in one]
    if not leaving:
        assert sorted(order(rounds)) == sorted(asked)
    assert len(order(rounds)) >= len(asked) - len(leaving)
    assert max(map(len, rounds)) <= 2
