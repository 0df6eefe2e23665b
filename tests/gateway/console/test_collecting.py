"""The state of a cluster, as the gateway collects it for operators."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from moesaic.api_keys import digest_of
from moesaic.cluster.placement_view import PlacementView
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.services.gateway import metrics
from moesaic.services.gateway.app import make_app
from moesaic.services.gateway.console.collector import Collector
from moesaic.services.gateway.console.experts import expert_map, held_by_workers, shares_of_workers
from moesaic.services.gateway.console.inflight import waits_for
from moesaic.services.gateway.console.latencies import Counted, counted
from moesaic.services.gateway.console.state import ClusterState, ExpertMap
from moesaic.services.gateway.main import http_server
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.scheduler_pb2 import LayerActivations, SchedulerServiceGetActivationsResponse
from tests.gateway.conftest import House, OpenHouse
from tests.waiting import HANG_S, until

BOUNDS = (0.01, 0.1, 1.0)


def placement(epoch: int = 1) -> Placement:
    """Two workers, which share expert 1 of layer 3."""
    workers = [
        PlacedWorker(worker_id=name, generation=1, admin_address="a:1", data_address="d:1")
        for name in ("expert-0", "expert-1")
    ]
    return Placement(
        epoch=epoch,
        model_digest="m",
        num_experts=3,
        workers=workers,
        layers=[3],
        slots=[[[0, 1], [1, 2]]],
    )


def record(name: str, role: Any, **more: Any) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        generation=1,
        role=role,
        state="ready",
        admin_address="127.0.0.1:1",
        **more,
    )


def show(house: House, *records: WorkerRecord, view: PlacementView | None = None) -> Collector:
    """Have a gateway show a cluster of these processes."""
    fleet = SimpleNamespace(workers={each.worker_id: each for each in records})
    house.gateway.console = Collector("gateway-7", house.gateway, fleet, view or PlacementView())
    return house.gateway.console


@given(st.lists(st.floats(0, 0.999), min_size=1, max_size=40))
def test_quantiles_lie_in_the_buckets_of_the_values_that_they_stand_for(
    values: list[float],
) -> None:
    histogram = Histogram("a", "b", registry=CollectorRegistry(), buckets=BOUNDS)
    for value in values:
        histogram.observe(value)

    found = counted(histogram).quantiles()

    assert found is not None
    for share, quantile in zip(
        (0.5, 0.9, 0.99), (found.p50_s, found.p90_s, found.p99_s), strict=True
    ):
        exact = sorted(values)[max(0, -(-round(share * 100) * len(values) // 100) - 1)]
        lower = max((bound for bound in (0.0, *BOUNDS) if bound < exact), default=0.0)
        upper = next(bound for bound in BOUNDS if exact <= bound)
        assert lower <= quantile <= upper


def test_latencies_are_those_since_the_first_sample_alone() -> None:
    histogram = Histogram("a", "b", registry=CollectorRegistry(), buckets=BOUNDS)
    histogram.observe(0.9)
    before = counted(histogram)
    assert counted(histogram).since(before).quantiles() is None

    histogram.observe(0.005)

    found = counted(histogram).since(before)
    assert found.total == 1
    assert (told := found.quantiles()) is not None
    assert told.p99_s <= 0.01


def test_observations_above_all_bounds_count_as_the_largest_one() -> None:
    assert Counted([0.01, 0.1, float("inf")], [0, 0, 5]).quantiles() is not None
    histogram = Histogram("a", "b", registry=CollectorRegistry(), buckets=BOUNDS)
    histogram.observe(50)
    found = counted(histogram).quantiles()
    assert found is not None
    assert found.p50_s == BOUNDS[-1]


def test_experts_have_their_holders_and_their_share_of_rows() -> None:
    rows = SchedulerServiceGetActivationsResponse(
        layers=[LayerActivations(layer=3, tokens=[10, 60, 30])]
    )

    found = expert_map(placement(), rows)

    assert found.holders == [[[0], [0, 1], [1]]]
    assert found.share == [[0.1, 0.6, 0.3]]
    assert shares_of_workers(found) == {"expert-0": 0.4, "expert-1": 0.6}
    assert held_by_workers(placement()) == {"expert-0": (2, 1), "expert-1": (2, 1)}


def test_without_a_placement_or_traffic_there_is_nothing_to_show() -> None:
    assert expert_map(None, None).layers == []
    assert expert_map(placement(), None).share == [[]]
    assert shares_of_workers(expert_map(placement(), None)) == {}
    assert held_by_workers(None) == {}


def test_a_request_waits_for_its_turn_then_a_worker_then_tokens() -> None:
    run: Any = Run([1], work=None, terms=None)  # type: ignore[arg-type]  # neither is looked at
    assert waits_for([]) == "its turn to be read"
    assert waits_for([run]) == "a place among its tenant's requests"
    run.under_way = object()
    assert waits_for([run]) == "an attention worker"
    run.placed_at = ("attention-0", 1)
    assert waits_for([run]) == "the first result of attention-0"
    run.token_ids = [5, 6]
    assert waits_for([run]) == "token 3 of attention-0"
    run.done = True
    assert waits_for([run]) == "its client"


async def test_the_state_names_processes_links_and_requests(
    open_house: OpenHouse, scripts: Any
) -> None:
    view = PlacementView()
    view.accept(placement())
    async with open_house(scripts.begins("yes and no")) as house:
        attention = record("attention-0", "attention", dispatch="routed", row_bytes=8)
        show(house, attention, record("expert-0", "expert"), view=view)
        body = {"prompt": "say", "max_tokens": 9, "stream": True}
        async with house.client.stream(
            "POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}
        ) as asked:
            lines = asked.aiter_lines()
            await anext(lines)
            found = (await house.client.get("/v1/moesaic/state")).content

    state = msgspec.json.decode(found, type=ClusterState)
    assert (state.gateway, state.epoch, state.ready) == ("gateway-7", 1, True)
    assert [(each.id, each.experts) for each in state.services] == [
        ("attention-0", 0),
        ("expert-0", 2),
    ]
    assert [each.layers for each in state.services] == [0, 1]
    assert [(each.id, each.route) for each in state.requests] == [("mine", "/v1/completions")]
    assert state.requests[0].waits_for.endswith("of attention-1")


async def test_experts_are_told_apart_from_the_state(open_house: OpenHouse) -> None:
    view = PlacementView()
    view.accept(placement(epoch=4))
    async with open_house() as house:
        show(house, view=view)
        found = (await house.client.get("/v1/moesaic/experts")).content
    assert msgspec.json.decode(found, type=ExpertMap).epoch == 4


async def states_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_states_come_while_somebody_watches_and_nobody_is_asked_afterwards(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.console.collector.EVERY_S", 0.01)
    async with open_house() as house:
        collector = show(house)
        for _ in range(2):
            async with house.client.stream("GET", "/v1/moesaic/events") as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                states = states_of(response)
                first, second = await anext(states), await anext(states)
                assert second["at"] > first["at"]
                assert collector.collects
            await until(lambda: not collector.collects)


async def test_a_gateway_outside_its_cluster_says_that_it_waits(open_house: OpenHouse) -> None:
    async with open_house() as house:
        response = await house.client.get("/v1/moesaic/state")
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_the_page_loads_nothing_from_elsewhere_and_no_other_files(
    open_house: OpenHouse,
) -> None:
    async with open_house() as house:
        page = await house.client.get("/console")
        script = await house.client.get("/console/app.js")
        others = [
            await house.client.get(f"/console/{name}")
            for name in ("LICENSES.txt", "..%2Fstate.py", "nothing.js")
        ]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")
    assert script.headers["content-type"].startswith("text/javascript")
    assert [each.status_code for each in others] == [404, 404, 404]


def keys(tmp_path: Any, **scopes: list[str]) -> str:
    file = tmp_path / "keys.json"
    tenants = [
        {"name": name, "keys": [digest_of(name)], "scopes": allowed}
        for name, allowed in scopes.items()
    ]
    file.write_text(json.dumps({"tenants": tenants}))
    return str(file)


async def test_where_callers_need_keys_the_console_has_a_listener_and_a_scope_of_its_own(
    open_house: OpenHouse, tmp_path: Any
) -> None:
    file = keys(tmp_path, user=["infer"], operator=["console"])
    async with open_house(api_keys_file=file) as house:
        show(house)

        def bearer(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        def statuses(*responses: httpx.Response) -> list[int]:
            return [response.status_code for response in responses]

        get: Callable[..., Any] = house.client.get
        page, state = (
            await get("/console"),
            await get("/v1/moesaic/state", headers=bearer("operator")),
        )
        assert statuses(page, state) == [404, 404]
        assert "--console-port" in state.json()["error"]["message"]

        async with (
            http_server(
                house.gateway.settings, make_app(house.gateway, shows_console=True)
            ) as address,
            httpx.AsyncClient(base_url=f"http://{address}", verify=False) as there,
        ):
            assert statuses(
                await there.get("/console"),
                await there.get("/v1/moesaic/state"),
                await there.get("/v1/moesaic/state", headers=bearer("user")),
                await there.get("/v1/moesaic/state", headers=bearer("operator")),
                await there.get("/v1/models", headers=bearer("operator")),
            ) == [200, 401, 403, 200, 403]


async def test_an_open_page_takes_no_place_of_its_tenant(
    open_house: OpenHouse, tmp_path: Any
) -> None:
    file = tmp_path / "keys.json"
    tenant = {"name": "t", "keys": [digest_of("k")], "scopes": ["console", "infer"]}
    file.write_text(json.dumps({"tenants": [{**tenant, "max_concurrent": 1}]}))
    key = {"authorization": "Bearer k"}
    async with open_house(api_keys_file=str(file)) as house:
        show(house)
        app = make_app(house.gateway, shows_console=True)
        async with (
            http_server(house.gateway.settings, app) as address,
            httpx.AsyncClient(base_url=f"http://{address}", headers=key, verify=False) as there,
            there.stream("GET", "/v1/moesaic/events") as response,
        ):
            states = states_of(response)
            await anext(states)
            other = await there.get("/v1/models")
    assert other.status_code == 200


async def test_probes_and_pages_are_no_traffic(open_house: OpenHouse, scripts: Any) -> None:
    before = metrics.sums(metrics.requests, "total")[""]
    async with open_house(scripts.says("yes")) as house:
        for _ in range(5):
            await house.client.get("/livez")
        assert metrics.sums(metrics.requests, "total")[""] == before
        await house.client.post("/v1/completions", json={"prompt": "say"})
        await until(lambda: metrics.sums(metrics.requests, "total")[""] == before + 1)


async def test_a_service_that_does_not_answer_is_shown_without_load(open_house: OpenHouse) -> None:
    async with open_house() as house:
        collector = show(
            house, record("attention-0", "attention"), record("scheduler", "scheduler")
        )
        async with collector.watching("t"):
            state = await asyncio.wait_for(collector.state(), HANG_S)
    assert [(each.id, each.load) for each in state.services] == [
        ("attention-0", None),
        ("scheduler", None),
    ]
    assert (state.brownout, state.scaling, state.decisions) == (None, None, [])
