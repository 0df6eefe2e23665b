"""Plans for edge agents rest on what these have told, and on nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from benchmarks.common.placements import placed_worker
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import DeadlineExceeded, PlacementInfeasible
from moesaic.messages.activation import ActivationWindow, LayerActivations
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.site_profile import PeerLink, SiteProfile
from moesaic.placement.traffic.origins import OriginTraffic
from moesaic.placement.traffic.statistics import Statistics
from moesaic.services.scheduler.epochs import staged
from moesaic.services.scheduler.epochs.confirmation import Confirmation
from moesaic.services.scheduler.epochs.placer import Placer
from moesaic.services.scheduler.planning.site_planner import (
    MigrationTerms,
    SitePlanner,
    _told_little,
)
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.solver_client import solver
from moesaic.services.scheduler.planning.traffic import ModelTraffic

NUM_EXPERTS, LAYERS = 8, [0, 1]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
CURRENT = Placement(
    epoch=5,
    model_digest="m",
    num_experts=NUM_EXPERTS,
    workers=[placed_worker(f"a{n}") for n in range(2)],
    layers=LAYERS,
    slots=[HALVES, HALVES],
)
RECORDS = [
    WorkerRecord(
        worker_id=f"a{n}",
        generation=1,
        role="edge-agent",
        state="ready",
        admin_address="",
        model_digest="m",
        slots_per_layer=NUM_EXPERTS,
        num_slots=8,
        num_experts=NUM_EXPERTS,
        layers=LAYERS,
        expert_bytes=100,
        max_expert_bytes=900,
    )
    for n in range(2)
]
TERMS = MigrationTerms(interval_s=60.0, load_share=0.5)


def profile(worker_id: str, **changes: Any) -> SiteProfile:
    links = [PeerLink(peer="other", rtt_s=0.004, bytes_per_s=1e6)]
    told = SiteProfile(
        worker_id=worker_id, generation=1, site=worker_id, window_s=5.0, links=links, layers_s=1.0
    )
    return msgspec.structs.replace(told, **changes)


def window(worker_id: str, experts: list[int], rows: int = 300) -> ActivationWindow:
    tokens = [rows if expert in experts else 0 for expert in range(NUM_EXPERTS)]
    layers = [
        LayerActivations(
            layer=layer, rows=rows, batches=10, tokens=tokens, active_batches=[0] * NUM_EXPERTS
        )
        for layer in LAYERS
    ]
    return ActivationWindow(
        worker_id=worker_id,
        generation=1,
        model_digest="m",
        num_experts=NUM_EXPERTS,
        epoch=5,
        window_s=5.0,
        layers=layers,
    )


class Feed:
    """Traffic in which each agent wants what the other one holds."""

    def __init__(self, rows: int = 300) -> None:
        now_s = asyncio.get_running_loop().time()
        origins = OriginTraffic(NUM_EXPERTS, LAYERS, 300.0)
        origins.add(window("a0", [4, 5], rows), now_s)
        origins.add(window("a1", [0, 1]), now_s)
        self.traffic: ModelTraffic | None = ModelTraffic(
            Statistics(NUM_EXPERTS, {}), now_s, origins
        )

    def of(self, model_digest: str) -> ModelTraffic | None:
        return self.traffic


def told(*worker_ids: str) -> SiteProfiles:
    profiles = SiteProfiles(cast("Any", None), cast("Any", None))
    now_s = asyncio.get_running_loop().time()
    for worker_id in worker_ids:
        profiles.take(profile(worker_id), now_s)
    return profiles


def planner(feed: Any, profiles: SiteProfiles) -> SitePlanner:
    return SitePlanner(feed, profiles, TERMS, partial(solver, limit_s=60.0))


@pytest.mark.parametrize("policy", ["auto", "optimal", "dance"])
async def test_experts_move_to_where_rows_come_from(policy: str) -> None:
    plan = await planner(Feed(), told("a0", "a1")).plan(CURRENT, RECORDS, policy, [])

    assert plan.worthwhile, plan.reason
    assert (plan.local_share_before, plan.local_share_after) == (0.0, 1.0)
    assert plan.row_s_before == pytest.approx(0.004)
    assert plan.row_s_after == 0.0
    for layer in plan.placement.slots:
        assert {4, 5} <= set(layer[0])
        assert {0, 1} <= set(layer[1])


async def test_what_agents_have_not_told_is_not_assumed() -> None:
    feed, quiet = Feed(), Feed()
    quiet.traffic = None
    silent = await planner(feed, told("a0")).plan(CURRENT, RECORDS, "auto", [])
    idle = await planner(quiet, told("a0", "a1")).plan(CURRENT, RECORDS, "auto", [])

    assert not silent.worthwhile
    assert silent.reason == "a1 has not told what experts at other sites cost"
    assert idle.reason == "no traffic has been seen yet"


async def test_an_old_profile_is_no_news_unless_the_next_is_not_due_yet() -> None:
    profiles = told()
    then_s = asyncio.get_running_loop().time() - 100
    profiles.take(profile("a0", window_s=5.0, remote=10, away_s=1.0), then_s)
    profiles.take(profile("a1", window_s=60.0), then_s)

    plan = await planner(Feed(), profiles).plan(CURRENT, RECORDS, "auto", [])

    assert plan.reason == "a0 has not told what experts at other sites cost"


async def test_few_requests_of_a_site_move_nothing() -> None:
    plan = await planner(Feed(rows=200), told("a0", "a1")).plan(CURRENT, RECORDS, "auto", [])

    assert not plan.worthwhile
    assert plan.reason == "too few requests of a0 have been seen so far"


async def test_a_policy_of_batches_is_refused() -> None:
    plan = await planner(Feed(), told("a0", "a1")).plan(CURRENT, RECORDS, "janus-batches", [])

    assert not plan.worthwhile
    assert plan.reason.startswith("janus-batches needs the batches of expert workers")


async def test_without_the_optimum_a_heuristic_plans() -> None:
    failed = []

    class Failing:
        async def ask(self, question: Any) -> Any:
            if question.policy == "optimal":
                failed.append(question.policy)
                raise DeadlineExceeded("the solver", 1.0)
            async with solver(limit_s=60.0) as asked:
                return await asked.ask(question)

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        yield Failing()

    planned = SitePlanner(cast("Any", Feed()), told("a0", "a1"), TERMS, start)
    plan = await planned.plan(CURRENT, RECORDS, "auto", [])

    assert failed == ["optimal"]
    assert (plan.policy, plan.worthwhile) == ("dance", True)
    alone = await planned.plan(CURRENT, RECORDS, "optimal", [])
    assert not alone.worthwhile
    assert "solver" in alone.reason


async def test_a_gain_that_does_not_pay_for_the_transfer_moves_nothing() -> None:
    profiles = told()
    for worker_id in ("a0", "a1"):
        slow = [PeerLink(peer="other", rtt_s=1e-6, bytes_per_s=10.0)]
        profiles.take(
            profile(worker_id, links=slow, layers_s=500.0), asyncio.get_running_loop().time()
        )

    plan = await planner(Feed(), profiles).plan(CURRENT, RECORDS, "auto", [])

    assert plan.moves
    assert not plan.worthwhile


async def test_a_worker_that_left_ends_the_plan() -> None:
    plan = await planner(Feed(), told("a0", "a1")).plan(CURRENT, RECORDS[:1], "auto", [])

    assert plan.reason == "a1 left"


async def test_measured_waits_count_more_than_links_and_fade() -> None:
    profiles = told("a0")
    now_s = asyncio.get_running_loop().time()
    assert profiles.remote_s("a0", now_s) == 0.004

    profiles.take(profile("a0", remote=100, away_s=1.0), now_s)
    assert profiles.remote_s("a0", now_s) == 0.01

    for _ in range(10):
        now_s += 60
        profiles.take(profile("a0", remote=100, away_s=3.0), now_s)
    assert profiles.remote_s("a0", now_s) == pytest.approx(0.03, rel=0.01)


async def test_moving_experts_is_as_slow_as_it_was_measured() -> None:
    profiles = told("a0")
    now_s = asyncio.get_running_loop().time()
    assert profiles.slowdown == pytest.approx(0.1)  # not known yet

    profiles.take(profile("a0", local=100, layers_s=199.0), now_s)
    profiles.migrating = True
    profiles.take(profile("a0", local=100, layers_s=300.0), now_s)

    measured = profiles.slowdown
    assert measured == pytest.approx(0.5, rel=0.01)  # 200 s for 100, of two windows, then 300 s

    profiles.migrating = False
    for _ in range(9):  # the new placement is quicker, which says nothing of the move to it
        profiles.take(profile("a0", local=100, layers_s=0.1), now_s)
    assert profiles.slowdown == measured


async def test_one_odd_window_does_not_stop_migrations_for_ever() -> None:
    profiles = told("a0")
    now_s = asyncio.get_running_loop().time()
    profiles.take(profile("a0", local=100_000, layers_s=2.0), now_s)  # long prompts
    profiles.migrating = True
    profiles.take(profile("a0", local=1_000, layers_s=5.0), now_s)  # answers, row by row
    profiles.migrating = False
    assert profiles.slowdown > 1.0

    for _ in range(12):
        now_s += 900.0
        profiles.take(profile("a0", local=1_000, layers_s=1.0), now_s)
    assert profiles.slowdown == pytest.approx(0.1, rel=0.1)


async def test_few_requests_of_many_alike_sites_move_nothing() -> None:
    rows = np.full(64, 3.0)

    few = _told_little([f"a{n}" for n in range(64)], rows, rows[:, None, None])

    assert few.startswith("a0, a1,")


async def test_costs_are_those_of_when_planning_began() -> None:
    profiles = told("a0", "a1")

    class Slow:
        async def ask(self, question: Any) -> Any:
            now_s = asyncio.get_running_loop().time()
            for worker_id in ("a0", "a1"):  # their links are lost while it solves
                profiles.take(profile(worker_id, links=[]), now_s)
            async with solver(limit_s=60.0) as asked:
                return await asked.ask(question)

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        yield Slow()

    planned = SitePlanner(cast("Any", Feed()), profiles, TERMS, start)
    plan = await planned.plan(CURRENT, RECORDS, "auto", [])

    assert plan.worthwhile, plan.reason
    again = await planned.plan(CURRENT, RECORDS, "auto", [])
    assert again.reason == "a0, a1 has not told what experts at other sites cost"


async def test_what_is_served_under_an_epoch_begins_after_the_window_with_the_switch() -> None:
    profiles = told("a0")
    now_s = asyncio.get_running_loop().time()
    assert profiles.served(6).choices == 0

    profiles.take(profile("a0", local=5, remote=5), now_s)
    profiles.take(profile("a0", local=30, remote=10, away_s=2.0), now_s)

    served = profiles.served(6)
    assert (served.choices, served.local, served.away_s) == (40, 30, 2.0)
    assert profiles.served(7).choices == 0


class Places:
    """Places whatever it is told to, but for the first ``failures`` times."""

    def __init__(self, view: Any, failures: int = 0) -> None:
        self.placed: list[Placement] = []
        self.confirmed: list[Placement] = []
        self._view, self._failures = view, failures

    async def place(self, wanted: Placement, **how: Any) -> Placement:
        if self._failures:
            self._failures -= 1
            raise PlacementInfeasible(1, 100)
        assert self.placed == self.confirmed  # or agents keep what the stage before replaced
        self.placed.append(wanted)
        self._view.current = wanted
        return wanted

    async def confirm(self, placed: Placement) -> bool:
        self.confirmed.append(placed)
        return True

    def require_wanted(self, placement: Placement, target: Placement | None) -> None:
        pass


class View:
    current: Placement | None = CURRENT


@pytest.mark.parametrize("failures", [0, 2])
async def test_experts_change_places_in_stages_that_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(staged, "REST_S", 0.0)
    view = View()
    places = Places(view, failures)
    fleet = Fleet()
    fleet.workers = {record.worker_id: record for record in RECORDS}
    wanted = msgspec.structs.replace(CURRENT, epoch=0, slots=[HALVES[::-1], HALVES[::-1]])

    await staged.place_in_stages(
        cast("Placer", places),
        cast("Confirmation", places),
        fleet,
        cast("PlacementView", view),
        wanted,
        urgent=False,
        begun=cast("Any", None),
    )

    assert len(places.placed) > 1
    assert places.placed[-1] == wanted
    before = CURRENT
    for step in places.placed:
        for n in range(2):
            held = {(at, e) for p in (before, step) for at in (0, 1) for e in p.slots[at][n]}
            assert len(held) <= 9  # max_expert_bytes
        assert all(set().union(*layer) == set(range(NUM_EXPERTS)) for layer in step.slots)
        before = step
