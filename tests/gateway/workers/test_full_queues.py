"""What the workers' queues have no room for is refused when it comes: it reaches no worker, and waits for nothing."""

import asyncio
from typing import Any

import msgspec
import pytest
from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from moesaic.errors import Overloaded
from moesaic.services.gateway.fields.tokenizing import DetokenizeWire
from moesaic.services.gateway.http.direct import direct_routes
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.http.turnstile import Lane, Turnstile
from moesaic.v1 import attention_pb2 as pb
from tests.waiting import until

BODY = {"prompt": "hello", "max_tokens": 3}


async def tell_limits(house: Any, waiting: int, tokens: int = 1 << 20, running: int = 1) -> None:
    """Have all workers tell the limits of their queues."""
    for worker in house.workers:
        worker.profile = pb.EngineProfile(
            max_step_tokens=1 << 16,
            max_waiting_requests=waiting,
            max_waiting_tokens=tokens,
            max_running_requests=running,
        )
        worker.tell_all()
    shadows = house.gateway.workers.routing.router.fleet.workers
    await house.until(lambda: all(s.limits.max_waiting == waiting for s in shadows.values()))


async def burst(house: Any, bodies: list[dict[str, Any]], kept: int, others: int = 0) -> list[Any]:
    """Send all at once, beside others; gives the answers of those that are not kept waiting."""
    asked = [
        asyncio.ensure_future(house.client.post("/v1/completions", json=body)) for body in bodies
    ]
    await until(lambda: sum(task.done() for task in asked) >= len(bodies) - kept)
    answered = [task.result() for task in asked if task.done()]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await house.until(lambda: house.gateway.num_inflight == others)
    return answered


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_burst_gets_as_far_as_there_is_room(open_house, scripts, num_workers) -> None:
    async with open_house(*[scripts.silent] * num_workers) as house:
        await tell_limits(house, 4)
        kept = 4 * num_workers
        refused = await burst(house, [BODY] * 30, kept)
        submits = sum(len(worker.submits) for worker in house.workers)
        crowd = house.gateway.workers.routing.router.fleet.crowd

    assert [answer.status_code for answer in refused] == [503] * (30 - kept)
    assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert submits == kept
    assert (crowd.num_requests, crowd.num_tokens) == (0, 0)


async def test_answers_that_do_not_fit_together_are_refused_before_a_worker_has_one(
    open_house, scripts
) -> None:
    async with open_house(scripts.silent) as house:
        await tell_limits(house, 4)
        answer = await house.client.post("/v1/completions", json={**BODY, "n": 9})
        long = {"prompt": [5] * 60, "max_tokens": 1}
        await tell_limits(house, 99, tokens=130)
        refused = await burst(house, [long] * 5, 2)

    assert answer.json()["error"]["code"] == "overloaded"
    assert [answer.status_code for answer in refused] == [503] * 3


async def test_what_has_begun_waits_no_more(open_house, scripts) -> None:
    async with open_house(scripts.begins("hello")) as house:
        await tell_limits(house, 2)
        fleet = house.gateway.workers.routing.router.fleet
        asked = []
        for count in range(1, 6):  # one after the other: each has begun when the next one comes
            asked.append(
                asyncio.ensure_future(
                    house.client.post("/v1/completions", json={**BODY, "max_tokens": 99})
                )
            )
            await house.until(
                lambda count=count: sum(w.num_began for w in fleet.workers.values()) == count
            )
        await tell_limits(house, 2)
        for task in asked:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_others_work_takes_room_beyond_what_runs(open_house, scripts) -> None:
    async with open_house(scripts.silent) as house:
        await tell_limits(house, 4, running=10)
        house.workers[0].tell(others_work=pb.OthersWork(num_requests=13))
        fleet = house.gateway.workers.routing.router.fleet
        await house.until(lambda: fleet.room is not None and fleet.room.num_requests == 1)
        refused = await burst(house, [BODY] * 3, 1)

    assert [answer.status_code for answer in refused] == [503] * 2


async def test_what_waits_at_a_worker_that_leaves_takes_no_room_from_others(
    open_house, scripts
) -> None:
    async with open_house(scripts.silent) as house:
        await tell_limits(house, 4)
        asked = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY)) for _ in "abc"
        ]
        await house.until(lambda: len(house.workers[0].submits) == 3)
        await house.add(scripts.silent)
        await tell_limits(house, 4)
        leaving = house.fleet.workers["attention-1"]
        house.fleet.put(msgspec.structs.replace(leaving, state="draining"))
        await house.until(lambda: len(house.gateway.workers.accepting) == 1)
        refused = await burst(house, [BODY] * 6, 4, others=3)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    assert [answer.status_code for answer in refused] == [503] * 2


async def test_a_worker_that_tells_no_limits_bounds_nothing(open_house, scripts) -> None:
    async with open_house(scripts.anything) as house:
        answers = await asyncio.gather(
            *(house.client.post("/v1/completions", json=BODY) for _ in range(20))
        )

    assert [answer.status_code for answer in answers] == [200] * 20


async def test_what_is_refused_does_not_wait_for_a_turn() -> None:
    router, order = APIRouter(), []

    @router.post("/asked")
    async def asked(body: DetokenizeWire, request: Request) -> Response:
        order.append("begun")
        return PlainTextResponse("yes")

    def enter(record: RequestRecord, give_way: Any) -> None:
        if record.tenant == "late":
            raise Overloaded("there is no room")

    def refuse(request: Request, error: Exception) -> Response:
        order.append("refused")
        return PlainTextResponse("no", 503)

    found = direct_routes(router.routes, refuse, lambda body: [], lambda kind: enter)
    content = b'{"tokens": [1]}'

    async def call(tenant: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None: ...

        record = RequestRecord("r", "POST", tenant)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "headers": headers, "state": {"record": record}}
        await found["POST", "/asked"](scope, receive, send)

    await asyncio.gather(*(call("early") for _ in range(20)), call("late"))

    assert order.index("refused") <= 2
    assert order.count("begun") == 20


async def test_a_tenant_with_less_waiting_takes_the_place_of_the_one_with_most() -> None:
    turnstile = Turnstile()
    heavy = [asyncio.ensure_future(turnstile.turn("a")) for _ in range(5)]
    await asyncio.sleep(0)  # each has asked for its turn

    assert not turnstile.give_way("a")
    assert turnstile.give_way("b")
    results = await asyncio.gather(*heavy, return_exceptions=True)

    assert isinstance(results[-1], Overloaded)
    assert results[:-1] == [None] * 4
    assert not turnstile.give_way("b")


async def test_a_lane_takes_one_at_a_time_and_tenants_in_turn() -> None:
    lane, order = Lane(), []
    work = [lane.work(tenant, order.append, tenant) for tenant in ("a",) * 4 + ("b",)]
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert order == ["a", "b", "a", "a"]
    assert await lane.work("a", lambda: 5) == 5
