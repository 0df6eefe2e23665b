"""The console in a real browser, before clusters of any size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from moesaic.cluster.placement_view import PlacementView
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.services.gateway.app import make_app
from moesaic.services.gateway.main import http_server
from moesaic.v1 import scheduler_pb2 as pb
from moesaic.v1 import scheduler_pb2_grpc
from tests.browsers import Page, browser, needs_chromium
from tests.gateway.conftest import House, OpenHouse
from tests.gateway.console.test_collecting import keys, record, show

pytestmark = needs_chromium
pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")

VIEWS = (
    *("overview", "traffic", "experts", "brownout", "decisions", "requests", "edge"),
    "playground",
)
EXPERTS, LAYERS = 128, 48


class _Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers as a scheduler with some decisions does."""

    async def GetDecisions(self, request: Any, context: Any) -> pb.GetDecisionsResponse:
        decision = pb.Decision(
            decision_id="p1", at=2, cause="traffic", adopted=True, reason="the load moved",
            epoch_before=1, epoch=2, moves=3, predicted_before=5, predicted_after=4, measured_after=4.2,
        )  # fmt: skip
        return pb.GetDecisionsResponse(decisions=[decision], policy="janus")

    async def GetBrownout(self, request: Any, context: Any) -> pb.GetBrownoutResponse:
        decision = pb.BrownoutDecision(
            decision_id="b1", worker_id="attention-0", at=3, reason="overload", prefill_before=1,
            prefill=0.5, decode_before=1, decode=1, predicted_ttft_s=0.2,
        )  # fmt: skip
        policy = pb.BrownoutPolicy(mode="auto", slo_ttft_s=0.25, slo_tpot_s=0.15)
        return pb.GetBrownoutResponse(policy=policy, decisions=[decision])

    async def GetScaling(self, request: Any, context: Any) -> pb.GetScalingResponse:
        shape = pb.FleetShape(attention=2, experts=4)
        decision = pb.ScalingDecision(
            decision_id="s1", at=1, cause="slo", adopted=False, before=shape, wanted=shape
        )
        policy = pb.ScalingPolicy(mode="advise")
        return pb.GetScalingResponse(policy=policy, shape=shape, decisions=[decision])

    async def GetActivations(
        self, request: Any, context: Any
    ) -> pb.SchedulerServiceGetActivationsResponse:
        layers = [
            pb.LayerActivations(layer=layer, tokens=[(layer + e) % 7 for e in range(EXPERTS)])
            for layer in range(LAYERS)
        ]
        return pb.SchedulerServiceGetActivationsResponse(layers=layers)


def placed(epoch: int, num_workers: int, first: int = 0) -> Placement:
    """Spread all experts over workers, beginning with the worker ``first``."""
    each = EXPERTS // num_workers
    workers = [
        PlacedWorker(worker_id=f"expert-{n}", generation=1, admin_address="a:1", data_address="d:1")
        for n in range(num_workers)
    ]
    slots = [
        [(expert + first * each) % EXPERTS for expert in range(n * each, (n + 1) * each)]
        for n in range(num_workers)
    ]
    return Placement(
        epoch=epoch,
        model_digest="m",
        num_experts=EXPERTS,
        workers=workers,
        layers=list(range(LAYERS)),
        slots=[slots] * LAYERS,
    )


@asynccontextmanager
async def scheduler() -> AsyncIterator[str]:
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_Scheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def show_cluster(house: House, address: str, num_workers: int) -> PlacementView:
    """Show as many attention as expert workers."""
    view = PlacementView()
    view.accept(placed(1, num_workers))
    leader = record("scheduler", "scheduler", node="n")
    leader = replace(leader, admin_address=address)
    workers = [
        record(f"{role}-{n}", role, dispatch="routed" if role == "attention" else "", row_bytes=8)
        for role in ("attention", "expert")
        for n in range(num_workers)
    ]
    show(house, leader, record("gateway-7", "gateway"), *workers, view=view)
    return view


@pytest.mark.parametrize(("num_workers", "dark"), [(1, False), (128, True)])
async def test_every_view_shows_without_errors_and_for_all_people(
    num_workers: int, dark: bool, open_house: OpenHouse
) -> None:
    async with browser() as opened, scheduler() as address, open_house() as house:
        show_cluster(house, address, num_workers)
        page = await Page.of(opened, dark=dark)
        await page.tab.goto(f"{house.url}/console")
        await page.tab.wait_for_selector("text=Attention workers")

        wrong = {}
        for view in VIEWS:
            await page.tab.click(f"#tab-{view}")
            await page.tab.wait_for_selector(f"#tab-{view}[aria-selected=true]")
            if view == "experts":
                await page.tab.wait_for_selector("canvas")
            wrong[view] = await page.violations()

        assert wrong == {view: [] for view in VIEWS}
        assert page.errors == []
        theme = await page.tab.evaluate("document.documentElement.dataset.theme")
        assert theme == ("dark" if dark else "light")


async def test_decisions_have_their_predicted_and_measured_effect(open_house: OpenHouse) -> None:
    async with browser() as opened, scheduler() as address, open_house() as house:
        show_cluster(house, address, 2)
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console#decisions")
        await page.tab.wait_for_selector("text=the load moved")
        rows = await page.tab.locator("tbody tr").all_inner_texts()

    assert ["brownout" in rows[0], "placement" in rows[1], "scaling" in rows[2]] == [True] * 3
    assert "prefill 1.00 to 0.50" in rows[0]
    assert "TTFT 0.200 s" in rows[0]
    assert "epoch 1 to 2, 3 moves" in rows[1]
    assert "4.20 activated experts" in rows[1]
    assert "(not adopted)" in rows[2]


async def test_a_placement_change_is_seen_while_it_happens(open_house: OpenHouse) -> None:
    async with browser() as opened, scheduler() as address, open_house() as house:
        view = show_cluster(house, address, 2)
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console#experts")
        await page.tab.wait_for_selector("text=Experts of epoch 1")
        view.accept(placed(2, 2, first=1))
        await page.tab.wait_for_selector("text=Experts of epoch 2")
        # It is told for some seconds only.
        told = f"Epoch 2 is in force: {EXPERTS * LAYERS} experts have other holders."
        await page.tab.wait_for_selector(f"[role=status]:has-text('{told}')")


async def test_views_are_reached_by_keyboard(open_house: OpenHouse) -> None:
    async with browser() as opened, scheduler() as address, open_house() as house:
        show_cluster(house, address, 1)
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console")
        await page.tab.wait_for_selector("text=Attention workers")
        await page.tab.focus("#tab-overview")
        await page.tab.keyboard.press("ArrowRight")
        await page.tab.wait_for_selector("#tab-traffic[aria-selected=true]:focus")
        await page.tab.keyboard.press("ArrowLeft")
        await page.tab.keyboard.press("ArrowLeft")
        await page.tab.wait_for_selector("#tab-playground[aria-selected=true]:focus")


async def test_the_playground_streams_an_answer_with_its_facts(
    open_house: OpenHouse, scripts: Any
) -> None:
    async with browser() as opened, open_house(scripts.says("yes, it is <b>bold</b>")) as house:
        show(house, record("attention-1", "attention"))
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console#playground")
        await page.tab.click("text=Send")
        await page.tab.wait_for_selector("dt:has-text('epoch') + dd:has-text('3')")
        answer = await page.tab.locator(".answer").inner_text()
        workers = await page.tab.locator("dt:has-text('attention workers') + dd").inner_text()
        # A gateway that stops cuts the stream of the console, which the page tells.
        assert page.errors == []

    assert "<b>bold</b>" in answer
    assert workers == "attention-1"


async def test_where_keys_are_needed_the_page_asks_for_one(
    open_house: OpenHouse, tmp_path: Any
) -> None:
    file = keys(tmp_path, operator=["console", "infer"])
    async with browser() as opened, open_house(api_keys_file=file) as house:
        show(house, record("attention-0", "attention"))
        async with http_server(
            house.gateway.settings, make_app(house.gateway, shows_console=True)
        ) as address:
            page = await Page.of(opened)
            await page.tab.goto(f"http://{address}/console")
            await page.tab.fill("input[type=password]", "operator")
            await page.tab.click("text=Open")
            await page.tab.wait_for_selector("text=attention-0")


async def test_a_gateway_that_falls_silent_is_told_and_asked_again(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.console.collector.EVERY_S", 3600)
    async with browser() as opened, open_house() as house:
        show(house, record("attention-0", "attention"))
        page = await Page.of(opened)
        await page.tab.clock.install()
        await page.tab.goto(f"{house.url}/console")
        await page.tab.wait_for_selector("text=attention-0")
        # The clock stands still there, or the page would ask anew before anybody saw that it was told.
        await page.tab.clock.pause_at(datetime.now() + timedelta(hours=1))
        await page.tab.wait_for_selector("[role=alert]:has-text('silent')")
        await page.tab.clock.run_for(10_000)
        await page.tab.wait_for_selector("[role=alert]", state="detached")


async def test_a_key_that_no_header_carries_is_asked_for_again(
    open_house: OpenHouse, tmp_path: Any
) -> None:
    file = keys(tmp_path, operator=["console"])
    async with browser() as opened, open_house(api_keys_file=file) as house:
        show(house, record("attention-0", "attention"))
        app = make_app(house.gateway, shows_console=True)
        async with http_server(house.gateway.settings, app) as address:
            page = await Page.of(opened)
            await page.tab.goto(f"http://{address}/console")
            for key, seen in (("ключ", "text=characters that no key has"), ("operator", "h2")):
                await page.tab.fill("input[type=password]", key)
                await page.tab.click("text=Open")
                await page.tab.wait_for_selector(seen)
            await page.tab.wait_for_selector("text=attention-0")


async def test_who_leaves_the_playground_ends_its_request(
    open_house: OpenHouse, scripts: Any
) -> None:
    async with browser() as opened, open_house(scripts.begins("yes and no")) as house:
        show(house, record("attention-1", "attention"))
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console#playground")
        await page.tab.click("text=Send")
        await page.tab.wait_for_selector(".answer")
        assert house.gateway.inflight
        await page.tab.click("#tab-overview")
        await house.until(lambda: not house.gateway.inflight)


async def test_a_selected_process_that_goes_is_selected_no_more(open_house: OpenHouse) -> None:
    async with browser() as opened, scheduler() as address, open_house() as house:
        show_cluster(house, address, 2)
        page = await Page.of(opened)
        await page.tab.goto(f"{house.url}/console")
        await page.tab.click("text=expert-1")
        await page.tab.wait_for_selector("[aria-pressed=true]")
        assert house.gateway.console is not None
        del house.gateway.console._fleet.workers["expert-1"]
        await page.tab.wait_for_selector("text=expert-1", state="detached")
        assert await page.tab.locator("[aria-pressed=true]").count() == 0
