import asyncio
import re

from benchmarks.common.placements import placed_worker
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.coverage import missing_experts
from moesaic.services.gateway.readiness import lacking_experts, lacks


def finished(house) -> list[dict[str, object]]:
    return [line for line in house.logs if line["event"] == "request.finished"]


async def test_every_request_is_logged_once_with_how_it_ended(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        await house.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "r1"}
        )
        await house.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        await house.client.post("/v1/completions", json={"prompt": "a", "n": 99})
        await house.client.get("/secret/path")
        await house.until(lambda: len(finished(house)) == 4)
        # A stream's line is written after its last byte, when the next request may be there already.
        lines = sorted(finished(house), key=lambda line: (line["status"], line["stream"]))

    assert [(line["route"], line["status"], line["outcome"]) for line in lines] == [
        ("/v1/completions", 200, "done"),
        ("/v1/completions", 200, "done"),
        ("/v1/completions", 400, "errored"),
        ("other", 404, "errored"),
    ]
    assert lines[0]["request_id"] == "r1"
    assert [line["stream"] for line in lines] == [False, True, False, False]
    counts = [line["completion_tokens"] for line in lines[:2]]
    assert counts == [len(scripts.ids("yes")) + 1] * 2  # as usage has it, with the end token


async def test_a_client_that_leaves_is_logged_once_as_cancelled(open_house, scripts) -> None:
    async with open_house(scripts.begins("this is a story about a house")) as house:
        for number, stream in enumerate((True, False)):
            body = {"prompt": "a", "stream": stream, "max_tokens": 50}
            asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
            await house.until(lambda n=number: len(house.workers[0].submits) > n)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await house.until(lambda: house.gateway.num_inflight == 0)
        lines = finished(house)

    assert [(line["outcome"], line["code"]) for line in lines] == [
        ("cancelled", "client_closed_request")
    ] * 2


async def test_prompts_and_keys_stay_out_of_logs_metrics_and_errors(open_house, scripts) -> None:
    canary = "canary9f"
    headers = {"authorization": f"Bearer {canary}"}
    async with open_house(scripts.says("yes"), api_key=canary, log_level="debug") as house:
        bodies = [
            {"prompt": canary},
            {"prompt": canary, canary[::-1]: 1, "stream": True},
            {"prompt": canary * 200},
        ]
        responses = [
            await house.client.post("/v1/completions", json=b, headers=headers) for b in bodies
        ]
        metrics = await house.client.get("/metrics", headers=headers)
        logs = str(house.logs)

    assert [response.status_code for response in responses] == [200, 200, 400]
    assert metrics.status_code == 200
    assert canary not in logs + metrics.text + "".join(response.text for response in responses)


async def test_requests_are_counted_under_the_route_and_the_model(open_house, scripts) -> None:
    async with open_house(scripts.says("yes no yes")) as house:
        await house.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        text = (await house.client.get("/metrics")).text

    labels = 'model="tiny",route="/v1/completions"'
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert re.search(rf"moesaic_{name}_count{{{labels}}} [1-9]", text), name
    assert "moesaic_stream_truncations_total 0.0" in text


async def test_what_runs_is_ended_with_an_error_when_the_gateway_must_stop(
    open_house, scripts
) -> None:
    async with open_house(scripts.begins("this is a story")) as house:
        body = {"prompt": "a", "stream": True, "max_tokens": 200}
        async with house.client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.aiter_text()
            text = await anext(chunks)
            house.gateway.draining = True
            refused = await house.client.post("/v1/completions", json=body)
            house.gateway.abort_all()
            text += "".join([chunk async for chunk in chunks])

    assert refused.json()["error"]["code"] == "draining"
    assert '"code":"draining"' in text
    assert text.endswith("data: [DONE]\n\n")


def expert(worker_id: str, generation: int = 1) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        generation=generation,
        role="expert",
        state="ready",
        admin_address="h:1",
    )


def placed(slots: list[list[list[int]]]) -> Placement:
    workers = [placed_worker(name, "h:2", admin_address="h:1") for name in "ab"]
    return Placement(
        epoch=1, model_digest="d", num_experts=2, workers=workers, layers=[0], slots=slots
    )


def test_every_expert_needs_a_live_holder() -> None:
    split, doubled = placed([[[0], [1]]]), placed([[[0, 1], [1, 0]]])
    both = {"a": expert("a"), "b": expert("b")}
    restarted = {"a": expert("a"), "b": expert("b", generation=2)}

    assert not lacking_experts(split, both)
    assert not lacking_experts(doubled, restarted)
    assert list(lacking_experts(split, restarted)) == ["experts"]
    assert missing_experts(split, {("a", 1)}) == {0: [1]}
    assert list(lacking_experts(None, both)) == ["placement"]


def test_a_local_attention_worker_needs_no_experts() -> None:
    lacking = lacking_experts(None, {})

    assert not lacks(False, ["routed", "local"], lacking)
    assert list(lacks(False, ["routed"], lacking)) == ["placement"]
    assert list(lacks(True, [], lacking)) == ["gateway", "attention_workers"]
