"""What the workers' queues have no room for is refused when it comes: it reaches no worker, and waits for nothing."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse

from moesaic.api_keys import digest_of
from moesaic.errors import Overloaded
from moesaic.services.gateway.fields.generating import CompletionWire
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.http.turnstile import Lane, Turnstile
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.workers.execution import WINDOW
from moesaic.v1 import attention_pb2 as pb
from tests.waiting import until

BODY = {"prompt": "hello", "max_tokens": 3}
QUESTIONS = [{"type": "predicate", "instructions": f"It has {i} words."} for i in range(100)]
TEN = ["a story"] * 10
TENFOLD = [  # of ten runs each
    ("/v1/decisions", {"input": "a story", "questions": QUESTIONS[:10]}),
    ("/v1/classify", {"input": TEN, "labels": ["yes", "no"]}),
    ("/v1/classify", {"input": TEN[:5], "labels": ["yes", "no"], "method": "multi"}),
    ("/v1/rerank", {"query": "hello", "documents": TEN}),
    ("/v1/score", {"text_1": "hello", "text_2": TEN}),
    ("/generative_scoring", {"query": "hello", "items": TEN, "label_token_ids": [5, 6]}),
    ("/v1/completions", {**BODY, "prompt": ["hello", "world"], "n": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "n": 10}),
]


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


async def burst(
    house: Any,
    bodies: list[dict[str, Any]],
    kept: int,
    others: int = 0,
    path: str = "/v1/completions",
    runs: int = 1,
) -> list[Any]:
    """Send all at once, beside others; gives the answers of those that are not kept waiting.

    It ends the others once workers have what they let in: ``runs`` of each that is kept.
    """
    had = sum(len(worker.submits) for worker in house.workers)
    asked = [asyncio.ensure_future(house.client.post(path, json=body)) for body in bodies]
    await until(lambda: sum(task.done() for task in asked) >= len(bodies) - kept)
    await until(lambda: sum(len(worker.submits) for worker in house.workers) >= had + kept * runs)
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


@pytest.mark.parametrize(("path", "body"), TENFOLD)
async def test_a_request_of_several_runs_is_let_in_with_all_or_refused_before_a_worker_has_one(
    open_house, scripts, path, body
) -> None:
    async with open_house(scripts.silent) as house:
        await tell_limits(house, 25)
        refused = await burst(house, [body] * 8, 2, path=path, runs=10)
        sent = [submit.part_of for submit in house.workers[0].submits]
        crowd = house.gateway.workers.routing.router.fleet.crowd

    assert [answer.status_code for answer in refused] == [503] * 6
    assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
    assert sorted(map(sent.count, set(sent))) == [10, 10]
    assert (crowd.num_requests, crowd.num_tokens) == (0, 0)


@pytest.mark.parametrize(("path", "body"), TENFOLD)
async def test_what_is_refused_has_no_prompts_made(
    open_house, scripts, monkeypatch, path, body
) -> None:
    async with open_house(scripts.silent) as house:
        await tell_limits(house, 9)
        for work in ("work", "work_waiting"):
            monkeypatch.delattr(f"moesaic.services.gateway.language.Language.{work}")
        answer = await house.client.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")


async def test_a_request_that_was_let_in_goes_on_however_full_it_is_by_then(
    open_house, scripts
) -> None:
    release = asyncio.Event()

    async def script(submit: pb.Submit, emit: Any) -> None:
        if submit.HasField("scoring"):
            emit(progress=pb.Progress(computed_tokens=1))
            await release.wait()
            await scripts.scores(-1.0, -2.0)(submit, emit)

    async with open_house(script) as house:
        await tell_limits(house, 70)
        [worker], fleet = house.workers, house.gateway.workers.routing.router.fleet
        body = {"input": "a story", "questions": QUESTIONS}
        asking = asyncio.ensure_future(house.client.post("/v1/decisions", json=body))
        await house.until(lambda: fleet.workers and len(worker.submits) == WINDOW)
        await house.until(lambda: not fleet.crowd.num_requests)  # all have begun
        others = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
            for _ in range(70)
        ]
        await house.until(lambda: len(worker.submits) == WINDOW + 70)
        refused = await house.client.post("/v1/completions", json=BODY)
        release.set()
        answer = await asking
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    assert refused.status_code == 503
    assert answer.status_code == 200, answer.text


async def test_runs_that_a_worker_has_no_room_for_come_again_as_others_end(
    open_house, scripts
) -> None:
    full, held = scripts.fails(code="overloaded", message="full", http_status=503), 0
    refused = asyncio.Event()

    async def script(submit: pb.Submit, emit: Any) -> None:
        nonlocal held
        if held == 3:
            refused.set()
            await full(submit, emit)
            return
        held += 1
        await refused.wait()
        held -= 1
        await scripts.scores(-1.0, -2.0)(submit, emit)

    async with open_house(script) as house:
        body = {"input": "a story", "questions": QUESTIONS}
        answer = await house.client.post("/v1/decisions", json=body)
        crowd = house.gateway.workers.routing.router.fleet.crowd
        answered = len(house.workers[0].submits)

    assert answer.status_code == 200, answer.text
    assert answered > len(QUESTIONS)
    assert (crowd.num_requests, crowd.num_tokens) == (0, 0)


async def test_a_request_of_which_no_worker_has_anything_gives_way(open_house, scripts) -> None:
    full = scripts.fails(code="overloaded", message="full", http_status=503, retryable=True)
    async with open_house(full, full, full) as house:
        answer = await house.client.post("/v1/completions", json={**BODY, "n": 4})
        crowd = house.gateway.workers.routing.router.fleet.crowd

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert (crowd.num_requests, crowd.num_tokens) == (0, 0)


async def test_runs_that_the_gateways_queue_has_no_room_for_come_again(open_house, scripts) -> None:
    settings = {"router_saturation_flops": 1, "max_inflight": 1}
    limits = {"MAX_WAIT_S": 60, "QUEUED_PER_REQUEST": 3}
    async with open_house(scripts.scores(-1.0, -2.0), limits=limits, **settings) as house:
        body = {"input": "a story", "questions": QUESTIONS[:20]}
        answer = await house.client.post("/v1/decisions", json=body)
        submits = house.workers[0].submits

    assert answer.status_code == 200, answer.text
    assert len({submit.request_id for submit in submits}) == 20


async def test_an_answer_that_has_begun_waits_for_room_elsewhere(open_house, scripts) -> None:
    refusals = 0

    async def busy(submit: pb.Submit, emit: Any) -> None:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            emit(failure=pb.Failure(code="overloaded", message="full", http_status=503))
        else:
            await scripts.says("hello world")(submit, emit)

    async with open_house(scripts.begins("hello")) as house:
        body = {**BODY, "max_tokens": 99}
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
        await house.until(lambda: house.workers[0].submits)
        await house.heard(house.workers[0])
        await house.add(busy)
        await house.workers[0].kill()
        answer = await asking

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "hello world"
    assert refusals == 2


async def test_what_waits_for_places_of_its_tenant_needs_no_room(
    open_house, scripts, tmp_path
) -> None:
    entry = {"name": "a", "keys": [digest_of("k")], "scopes": ["infer"], "max_concurrent": 4}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"tenants": [entry]}))
    async with open_house(scripts.scores(-1.0, -2.0), api_keys_file=str(keys)) as house:
        await tell_limits(house, 4)
        house.client.headers["authorization"] = "Bearer k"
        body = {"input": "a story", "questions": QUESTIONS[:20]}
        answers = await asyncio.gather(
            *(house.client.post("/v1/decisions", json=body) for _ in range(4))
        )

    assert [answer.status_code for answer in answers] == [200] * 4


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


async def test_what_is_refused_does_not_wait_for_a_turn(open_house, scripts, monkeypatch) -> None:
    order: list[str] = []

    async def asked(body: CompletionWire, request: Request) -> Response:
        order.append("begun")
        return PlainTextResponse("yes")

    def enter(record: RequestRecord) -> None:
        if record.tenant == "late":
            raise Overloaded("there is no room")

    answer = JsonRoute("/asked", asked, methods=["POST"]).get_route_handler()

    async def call(app: FastAPI, tenant: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"prompt": [1]}', "more_body": False}

        headers = [(b"content-type", b"application/json")]
        record = RequestRecord("r", "POST", tenant)
        scope = {"type": "http", "headers": headers, "state": {"record": record}, "app": app}
        try:
            await answer(Request(scope, receive))
        except Overloaded:
            order.append("refused")

    async with open_house(scripts.anything) as house:
        monkeypatch.setattr(house.gateway, "enter", enter)
        app = FastAPI()
        app.state.gateway = house.gateway
        await asyncio.gather(*(call(app, "early") for _ in range(20)), call(app, "late"))

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
