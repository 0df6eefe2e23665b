"""Routed experts answer what local experts answer, for any number of workers, any placement, and through loss."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesaic.dispatch.expert_waits import Work
from moesaic.errors import ExpertUnavailable, StaleEpoch
from tests.dispatch import dispatcher_contract as contract
from tests.waiting import until

EVERYTHING = list(range(8))
NUM_EXPERTS, NUM_LAYERS = 8, 3
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


placements = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.sets(st.integers(0, n - 1), min_size=1), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS
    ).map(lambda held: [[e for e in range(NUM_EXPERTS) if w in held[e]] for w in range(n)])
)


@given(slots=placements)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_placement_gives_the_sums_of_local_experts(
    cluster: Any, tiny_model: Any, slots: list[list[int]]
) -> None:
    async def run() -> None:
        async with cluster(tiny_model, len(slots)) as c:
            c.put_in_force(c.placement(1, *slots))
            await c.check()

    asyncio.run(run())


class TestRouted(
    contract.DispatcherContract,
    contract.OwnStepsContract,
    contract.BatchesAtOnceContract,
    contract.RemoteContract,
):
    deterministic = False

    @pytest.fixture
    async def opened(self, cluster: Any, tiny_model: Any) -> AsyncIterator[contract.Opened]:
        async with cluster(tiny_model, 2, deterministic=self.deterministic) as c:
            c.put_in_force(c.placement(1, *HALVES))
            await c.routed.reachable()
            lose = c.networks[1].close
            yield contract.Opened(c.routed, c.local, c.config, self.deterministic, lose, "expert-1")

    @pytest.fixture
    async def unreached(self, cluster: Any, tiny_model: Any) -> AsyncIterator[contract.Unreached]:
        async with cluster(tiny_model, 2, deterministic=self.deterministic) as c:

            async def come() -> None:
                c.put_in_force(c.placement(1, *HALVES))

            yield contract.Unreached(c.routed, "a placement from the scheduler", come)


class TestRoutedOneByOne(TestRouted):
    """Sums that have the bits of local ones."""

    deterministic = True


async def test_a_new_epoch_is_taken_at_the_next_step_and_the_old_one_still_answers(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        assert await c.check() == 1
        old_step = c.routed.begin_step()

        c.put_in_force(c.placement(2, [7, 6, 5, 4], [3, 2, 1, 0]))

        assert await c.check() == 2
        await c.routed.dispatch(old_step, 0, torch.randn(2, 32))


async def test_placements_in_quick_succession_leave_a_running_step_its_experts_until_they_retire(
    cluster: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        step = c.routed.begin_step()
        c.put_in_force(c.placement(2, *reversed(HALVES)))
        c.put_in_force(c.placement(3, *HALVES))

        await c.routed.dispatch(step, 0, torch.randn(2, 32))

        for host in c.hosts:
            host.epochs.retire()  # too early
        await c.routed.dispatch(step, 1, torch.randn(2, 32))
        monkeypatch.setattr("moesaic.experts.epochs.RETIRE_AFTER_S", 0.0)
        held = c.hosts[0].epochs.resident_bytes
        for host in c.hosts:
            host.epochs.retire()
        assert c.hosts[0].epochs.resident_bytes < held
        with pytest.raises(StaleEpoch):
            await c.routed.dispatch(step, 2, torch.randn(2, 32))
        assert await c.check() == 3


async def test_a_worker_that_is_placed_no_more_loses_its_link_when_the_last_step_has_ended(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        step = c.routed.begin_step()
        hidden = torch.randn(2, 32)
        await c.routed.dispatch(step, 0, hidden)

        c.put_in_force(c.placement(2, EVERYTHING))
        assert c.routed.epoch == 2  # somebody looks, in the middle of the step
        for layer in range(1, NUM_LAYERS):
            await c.routed.dispatch(step, layer, hidden)
        assert c.networks[1].served_peers == ["attention-0"]
        c.routed.end_step(step)

        await c.networks[1].all_left()
        assert await c.check() == 2


async def test_without_steps_a_worker_that_is_placed_no_more_loses_its_link_as_well(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 3) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.routed.reachable()
        all_three = c.placement(2, [], *HALVES)

        c.routed.set_placement(  # expert-0 leaves for expert-2, which has yet to be dialled
            replace(
                all_three,
                workers=all_three.workers[1:],
                slots=[layer[1:] for layer in all_three.slots],
            )
        )

        await c.networks[0].all_left()
        assert c.networks[2].served_peers == ["attention-0"]


async def test_an_epoch_that_no_worker_has_is_refused_and_nothing_is_computed(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        c.routed.set_placement(c.placement(9, *HALVES))
        step = c.routed.begin_step()

        with pytest.raises(StaleEpoch) as refused:
            await c.routed.dispatch(step, 0, torch.randn(2, 32))

    assert (refused.value.sent, refused.value.current) == (9, 1)


async def test_a_lost_worker_is_named_and_its_replicas_serve_the_next_step(
    cluster: Any, tiny_model: Any
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        await c.check()
        step = c.routed.begin_step()
        await c.networks[1].close()

        with pytest.raises(ExpertUnavailable) as lost:
            await c.routed.dispatch(step, 0, torch.randn(2, 32))

        assert "expert-1" in lost.value.cause
        assert await c.check() == 1


async def test_without_replicas_steps_wait_until_the_worker_is_back_under_a_new_epoch(
    cluster: Any,
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        await c.networks[1].close()
        await until(lambda: c.routed.waiting_for)

        await c.restart(1)
        c.put_in_force(c.placement(2, *HALVES))

        assert await c.check() == 2


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_work_of_each_worker_is_told_once(
    cluster: Any, tiny_model: Any, deterministic: bool
) -> None:
    async with cluster(tiny_model, 2, deterministic=deterministic) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        work, again = c.routed.take_work(), c.routed.take_work()

    assert set(work.layers) == set(work.took_ns) == {"expert-0", "expert-1"}
    assert all(took_ns > 0 for took_ns in work.took_ns.values())
    assert all(layers % NUM_LAYERS == 0 for layers in work.layers.values())
    assert again == Work()
