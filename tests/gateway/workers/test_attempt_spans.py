"""A traced request has a span for each attempt: until it has a worker, and until that has ended it."""

import asyncio
from typing import Any

import pytest

from moesaic.telemetry import spans
from moesaic.v1 import attention_pb2 as pb
from tests.telemetry.collector import PROCESS, Collector, TakenSpan

TEXT = "this is a story about a house"
BODY = {"prompt": "hello", "max_tokens": 100}
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def sent(collector: Collector) -> Any:
    return spans.sent(collector.address, 0.0, PROCESS)


def named(collector: Collector, name: str) -> list[TakenSpan]:
    return [each for each in collector.of(TRACE) if each.name == name]


async def test_a_worker_gets_the_context_of_the_span_that_waits_for_it(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    with sent:
        async with open_house(scripts.says(TEXT)) as house:
            await house.client.post("/v1/completions", json=BODY, headers=HEADERS)
            await house.client.post("/v1/completions", json=BODY)
            first, second = house.workers[0].submits
    [http] = named(collector, "POST /v1/completions")
    [execute] = named(collector, "execute")

    assert first.traceparent == f"00-{TRACE}-{execute.span.span_id.hex()}-01"
    assert second.traceparent == ""
    assert execute.span.parent_span_id == http.span.span_id
    assert len(collector.taken) == 3


async def test_a_run_that_goes_on_elsewhere_has_two_attempts_in_one_trace(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    dying = asyncio.Event()

    async def script(submit: pb.Submit, emit: Any) -> None:
        dying.set()

    with sent:
        async with open_house(script, scripts.says(TEXT)) as house:
            first, _ = house.workers
            asking = asyncio.ensure_future(
                house.client.post("/v1/completions", json=BODY, headers=HEADERS)
            )
            await dying.wait()
            await first.kill()
            assert (await asking).status_code == 200
    lost, done = named(collector, "execute")

    assert [each.attributes["moesaic.attempt"] for each in (lost, done)] == [1, 2]
    assert lost.attributes["moesaic.worker_id"] != done.attributes["moesaic.worker_id"]
    assert lost.attributes["error.type"] == "worker_lost"
    assert "error.type" not in done.attributes
    [_, again] = named(collector, "route")
    assert again.attributes["moesaic.routing.excluded"] == 1


async def test_a_request_that_no_worker_takes_ends_its_spans_with_the_error(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    async def script(submit: pb.Submit, emit: Any) -> None:
        emit(failure=pb.Failure(code="internal_error", message="it broke", http_status=500))

    with sent:
        async with open_house(script) as house:
            answer = await house.client.post("/v1/completions", json=BODY, headers=HEADERS)
    [http], [execute] = named(collector, "POST /v1/completions"), named(collector, "execute")

    assert answer.status_code == http.attributes["http.response.status_code"] == 500
    for each in (http, execute):
        assert each.attributes["error.type"] == "internal_error"
        assert each.span.status.code == each.span.status.STATUS_CODE_ERROR


async def test_a_run_that_is_not_needed_to_its_end_is_cancelled_without_an_error(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    with sent:
        async with open_house(scripts.says(TEXT)) as house:
            body = BODY | {"stop": "story"}
            answer = await house.client.post("/v1/completions", json=body, headers=HEADERS)
    [execute] = named(collector, "execute")

    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert "error.type" not in execute.attributes


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/metrics"])
async def test_probes_are_not_traced(
    open_house: Any, scripts: Any, collector: Collector, sent: Any, path: str
) -> None:
    with sent:
        async with open_house(scripts.says(TEXT)) as house:
            await house.client.get(path, headers=HEADERS)

    assert collector.taken == []


async def test_a_refusal_is_a_span_of_its_own_with_the_code(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    with sent:
        async with open_house(scripts.says(TEXT)) as house:
            await house.client.post("/v1/completions", json={"prompt": 7}, headers=HEADERS)
            await house.client.get("/v1/nowhere", headers=HEADERS)
    refused, lost = collector.of(TRACE)

    assert refused.name == "POST /v1/completions"
    assert lost.name == "GET"
    assert "http.route" not in lost.attributes
    for each in (refused, lost):
        assert 400 <= each.attributes["http.response.status_code"] < 500
        assert each.attributes["moesaic.code"]
        # The server did as it should.
        assert "error.type" not in each.attributes
        assert each.span.status.code == each.span.status.STATUS_CODE_UNSET


async def test_what_a_client_chooses_is_cut_and_its_own_methods_have_no_names(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    with sent:
        async with open_house(scripts.says(TEXT)) as house:
            headers = HEADERS | {"user-agent": "a" * 5000}
            await house.client.request("PROPFIND", "/" + "b" * 3000, headers=headers)
    [brewed] = collector.of(TRACE)

    assert brewed.name == "HTTP"
    assert brewed.attributes["http.request.method"] == "_OTHER"
    assert len(brewed.attributes["user_agent.original"]) == 200
    assert len(brewed.attributes["url.path"]) == 200


async def test_a_stream_that_breaks_off_after_its_status_is_an_error(
    open_house: Any, scripts: Any, collector: Collector, sent: Any
) -> None:
    async def script(submit: pb.Submit, emit: Any) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids(TEXT)[:1]))
        emit(failure=pb.Failure(code="internal_error", message="it broke", http_status=500))

    with sent:
        async with open_house(script) as house:
            body = BODY | {"stream": True}
            await house.client.post("/v1/completions", json=body, headers=HEADERS)
    [http] = named(collector, "POST /v1/completions")

    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["error.type"] == "internal_error"
