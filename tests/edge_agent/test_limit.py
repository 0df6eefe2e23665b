"""An agent whose steps take more than was planned for keeps so much free from then on."""

import asyncio
from typing import Any

import pytest

from moesaic.cluster.waiting import Changes
from moesaic.errors import InvalidInput
from moesaic.services.edge_agent import limit as limits
from moesaic.services.edge_agent.limit import MemoryLimit
from moesaic.services.edge_agent.memory import MemoryNeeds, RequestedSizes, plan_memory

LIMIT = 80_000_000
NEEDS = MemoryNeeds(
    held=19_000_000, expert=196_608, block=131_072, row=51_200, num_experts=256, at_once=4
)
REQUESTED = RequestedSizes(kv_blocks=0, most_rows=2048, most_blocks=1024)


class Site:
    """The memory of a site, without its parts."""

    def __init__(self) -> None:
        self.needs, self.is_settled, self.allowed_bytes = NEEDS, True, 0
        self.change_limit(LIMIT)

    def change_limit(self, limit_bytes: int) -> None:
        self.plan = plan_memory(limit_bytes, self.needs, REQUESTED)


class Lease:
    """Takes what the scheduler is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    async def update(self, **facts: Any) -> None:
        self.told.append(facts["num_slots"])


class Profiler(Changes):
    """Says what a test has it say; a change each time it is asked."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.taken_bytes = site, 0

    @property
    def used_bytes(self) -> int:
        self.note_change()
        return self.taken_bytes


class Kept:
    """An agent's limit with a process that takes as much memory as a test says."""

    def __init__(self) -> None:
        self.site, self.lease = Site(), Lease()
        self.profiler = Profiler(self.site)
        self.limit = MemoryLimit(self.profiler, self.lease)  # type: ignore[arg-type]  # stands in

    async def takes(self, used_bytes: int) -> None:
        self.profiler.taken_bytes = used_bytes
        keeping = asyncio.create_task(self.limit.keep())
        # Each look asks twice at most.
        for _ in range(6):
            await self.profiler.changed()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(limits, "LOOK_EVERY_S", 0.005)
    return Kept()


async def test_what_was_taken_beyond_the_plan_is_kept_free_from_then_on(kept: Kept) -> None:
    before = kept.site.plan.num_slots
    await kept.takes(LIMIT + 2_000_000)

    freed = (before - kept.site.plan.num_slots) * NEEDS.expert
    assert 2_000_000 <= freed <= 2_000_000 + LIMIT // 16
    assert kept.lease.told == [kept.site.plan.num_slots]
    assert kept.site.plan.limit_bytes == LIMIT


async def test_what_fits_changes_nothing(kept: Kept) -> None:
    await kept.takes(int(0.97 * LIMIT))

    assert kept.lease.told == []
    assert kept.site.needs == NEEDS


async def test_nothing_is_learnt_while_experts_leave_for_a_lower_limit(kept: Kept) -> None:
    kept.site.is_settled = False
    await kept.takes(LIMIT + 2_000_000)

    assert kept.site.needs == NEEDS
    assert kept.lease.told == []


async def test_nothing_is_learnt_from_experts_that_left_while_memory_was_given_back(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.site.is_settled = False
    monkeypatch.setattr(limits, "_trim", lambda: setattr(kept.site, "is_settled", True))
    await kept.takes(LIMIT + 2_000_000)

    assert kept.site.needs == NEEDS


async def test_what_stays_beyond_the_limit_is_learnt_once_it_is_known_to_stay(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BEYOND_EVERY_S", 0.01)
    kept.site.is_settled = False
    await kept.takes(LIMIT + 1_000_000)  # experts were still leaving
    assert kept.site.needs == NEEDS

    kept.site.is_settled = True
    await kept.takes(LIMIT + 1_000_000)  # no more than before

    assert kept.site.needs.held > NEEDS.held


async def test_a_limit_that_is_raised_while_memory_is_given_back_is_the_one_that_counts(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_trim", lambda: kept.site.change_limit(2 * LIMIT))
    await kept.takes(LIMIT + 1_000_000)

    assert kept.site.needs == NEEDS


async def test_an_agent_that_could_hold_no_expert_at_all_goes_on_as_it_was(kept: Kept) -> None:
    await kept.takes(10 * LIMIT)

    assert kept.site.needs == NEEDS
    assert kept.lease.told == []


async def test_an_operator_can_lower_the_limit_but_not_below_one_expert(kept: Kept) -> None:
    slots = await kept.limit.set(60_000_000)

    assert slots == plan_memory(60_000_000, NEEDS, REQUESTED).num_slots
    assert kept.lease.told == [slots]
    with pytest.raises(InvalidInput):
        await kept.limit.set(NEEDS.held)
