"""Routed experts answer what local experts answer, for any number of workers, any placement, and through loss."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesaic.dispatch.host import ACTIVATED, MOST_ACTIVATED, ExpertHost
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed import DIVERGENCES, RoutedDispatcher
from moesaic.dispatch.terms import Terms
from moesaic.errors import ExpertUnavailable, InvalidInput, NotReady, StaleEpoch
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.scheduling import POLICIES, ExpertScheduling
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import load_config
from moesaic.models.gate import Gate
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.inprocess import Hub, InProcessNetwork

CPU, FP32 = torch.device("cpu"), torch.float32
EVERYTHING = list(range(8))
NUM_EXPERTS, NUM_LAYERS = 8, 3
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


class Cluster:
    """Expert hosts behind in-process networks, one routed dispatcher, and the local one as the reference."""

    def __init__(
        self,
        model: Any,
        num_workers: int,
        slots: int = NUM_EXPERTS,
        scheduling: ExpertScheduling = "aebs",
    ) -> None:
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.hub, self.limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.hosts = [
            ExpertHost(self.checkpoint, self.config, f"expert-{n}", slots, FP32, CPU)
            for n in range(num_workers)
        ]
        self.networks = [self._network(host._worker_id) for host in self.hosts]
        self.addresses: list[str] = []
        gates = {
            layer: Gate.load(self.checkpoint, self.config, layer, FP32, CPU)
            for layer in self.config.moe_layers
        }
        self.client = self._network("attention-0")
        self.routed = RoutedDispatcher(self.client, gates, 2.0, scheduling)
        self.local = LocalDispatcher(self.checkpoint, self.config, FP32, CPU)

    def _network(self, worker_id: str) -> InProcessNetwork:
        return InProcessNetwork(worker_id, b"secret", self.limits, self.hub)

    def placement(self, epoch: int, *slots: list[int]) -> Placement:
        """The same slots in every layer."""
        return Placement(
            epoch=epoch,
            model_digest=self.config.digest,
            num_experts=NUM_EXPERTS,
            workers=[
                PlacedWorker(
                    worker_id=f"expert-{n}",
                    generation=1,
                    admin_address="",
                    data_address=self.addresses[n],
                )
                for n in range(len(slots))
            ],
            layers=list(range(NUM_LAYERS)),
            slots=[[list(s) for s in slots] for _ in range(NUM_LAYERS)],
        )

    def put_in_force(self, placement: Placement) -> None:
        """What the scheduler does."""
        for host in self.hosts[: len(placement.workers)]:
            host.prepare(placement)
        for host in self.hosts[: len(placement.workers)]:
            host.commit(placement.epoch)
        self.routed.set_placement(placement)

    async def check(self, rows: int = 7) -> int:
        """Compare every layer; returns the epoch it ran under."""
        await asyncio.wait_for(self.routed.reachable(), 5)
        step = self.routed.begin_step()
        for layer in range(NUM_LAYERS):
            hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows + layer))
            got = await self.routed.dispatch(step, layer, hidden)
            expected = await self.local.dispatch(self.local.begin_step(), layer, hidden)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order
        self.routed.end_step(step)
        return step.epoch


@asynccontextmanager
async def cluster(
    model: Any,
    num_workers: int,
    slots: int = NUM_EXPERTS,
    scheduling: ExpertScheduling = "aebs",
) -> AsyncIterator[Cluster]:
    c = Cluster(model, num_workers, slots, scheduling)
    for host, network in zip(c.hosts, c.networks, strict=True):
        c.addresses.append(await network.listen("memory", 0, host.answer))
    try:
        yield c
    finally:
        await c.routed.close()
        for network in (c.client, *c.networks):
            await network.close()


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
    tiny_model: Any, slots: list[list[int]]
) -> None:
    async def run() -> None:
        async with cluster(tiny_model, len(slots)) as c:
            c.put_in_force(c.placement(1, *slots))
            await c.check()

    asyncio.run(run())


@pytest.mark.parametrize("rows", [1, 2, 64, 300])
async def test_any_number_of_rows(tiny_model: Any, rows: int) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))

        assert await c.check(rows) == 1


async def test_without_a_placement_nothing_begins_and_it_is_said_why(tiny_model: Any) -> None:
    async with cluster(tiny_model, 1) as c:
        assert c.routed.waiting_for == ["a placement from the scheduler"]
        with pytest.raises(NotReady):
            c.routed.begin_step()


async def test_a_new_epoch_is_taken_at_the_next_step_and_the_old_one_still_answers(
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
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        step = c.routed.begin_step()
        c.put_in_force(c.placement(2, *reversed(HALVES)))
        c.put_in_force(c.placement(3, *HALVES))

        await c.routed.dispatch(step, 0, torch.randn(2, 32))

        for host in c.hosts:
            host.retire()  # too early
        await c.routed.dispatch(step, 1, torch.randn(2, 32))
        monkeypatch.setattr("moesaic.dispatch.host.RETIRE_AFTER_S", 0.0)
        held = c.hosts[0].resident_bytes
        for host in c.hosts:
            host.retire()
        assert c.hosts[0].resident_bytes < held
        with pytest.raises(StaleEpoch):
            await c.routed.dispatch(step, 2, torch.randn(2, 32))
        assert await c.check() == 3


async def test_a_worker_that_is_placed_no_more_loses_its_link_when_the_last_step_has_ended(
    tiny_model: Any,
) -> None:
    everything = list(range(NUM_EXPERTS))
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        step = c.routed.begin_step()
        hidden = torch.randn(2, 32)
        await c.routed.dispatch(step, 0, hidden)

        c.put_in_force(c.placement(2, everything))
        assert c.routed.epoch == 2  # somebody looks, in the middle of the step
        for layer in range(1, NUM_LAYERS):
            await c.routed.dispatch(step, layer, hidden)
        assert c.networks[1]._links.served_peers == ["attention-0"]
        c.routed.end_step(step)

        await c.networks[1]._links.all_left()
        assert await c.check() == 2


async def test_without_steps_a_worker_that_is_placed_no_more_loses_its_link_as_well(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 3) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await asyncio.wait_for(c.routed.reachable(), 5)
        all_three = c.placement(2, [], *HALVES)

        c.routed.set_placement(  # expert-0 leaves for expert-2, which has yet to be dialled
            replace(
                all_three,
                workers=all_three.workers[1:],
                slots=[layer[1:] for layer in all_three.slots],
            )
        )

        await c.networks[0]._links.all_left()
        assert c.networks[2]._links.served_peers == ["attention-0"]


async def test_an_epoch_that_no_worker_has_is_refused_and_nothing_is_computed(
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


async def test_a_lost_worker_is_named_and_its_replicas_serve_the_next_step(tiny_model: Any) -> None:
    everything = list(range(NUM_EXPERTS))
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, everything, everything))
        await c.check()
        step = c.routed.begin_step()
        await c.networks[1].close()

        with pytest.raises(ExpertUnavailable) as lost:
            await c.routed.dispatch(step, 0, torch.randn(2, 32))

        assert "expert-1" in lost.value.cause
        assert await c.check() == 1


async def test_without_replicas_steps_wait_until_the_worker_is_back_under_a_new_epoch(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.check()
        await c.networks[1].close()
        await asyncio.sleep(0.05)
        with pytest.raises(NotReady):
            c.routed.begin_step()
        assert "expert-1" in c.routed.waiting_for[0]

        c.networks[1] = c._network("expert-1")
        c.addresses[1] = await c.networks[1].listen("memory", 0, c.hosts[1].answer)
        c.put_in_force(c.placement(2, *HALVES))

        assert await c.check() == 2


async def test_workers_that_choose_other_experts_are_caught_and_overruled(tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        crooked = c.hosts[1]._gates[1]
        straight = crooked._linear
        crooked._linear = lambda x: -straight(x)
        before = DIVERGENCES._value.get()

        await c.check()

        assert DIVERGENCES._value.get() == before + 1


async def test_workers_that_choose_other_experts_are_overruled_with_replicas_too(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 3) as c:
        c.put_in_force(c.placement(1, EVERYTHING, [0, 1, 2, 3], [4, 5, 6, 7]))
        crooked = c.hosts[2]._gates[1]
        straight = crooked._linear
        crooked._linear = lambda x: -straight(x)
        before = DIVERGENCES._value.get()

        await c.check()

        assert DIVERGENCES._value.get() == before + 1


@pytest.mark.parametrize("scheduling", POLICIES)
async def test_every_policy_gives_the_sums_of_local_experts(
    tiny_model: Any, scheduling: ExpertScheduling
) -> None:
    async with cluster(tiny_model, 3, scheduling=scheduling) as c:
        c.put_in_force(c.placement(1, EVERYTHING, [0, 1, 2, 3], [7, 2, 5, 4, 6]))

        for rows in (1, 5, 40):
            await c.check(rows)


async def test_replicas_share_the_experts_of_a_row_evenly(tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        before = ACTIVATED._sum.get(), MOST_ACTIVATED._value.get()

        await c.check(1)

        top_k = c.config.moe.top_k
        assert top_k == 2
        assert ACTIVATED._sum.get() - before[0] == NUM_LAYERS * top_k
        # Each of the two workers has counted the larger half.
        assert MOST_ACTIVATED._value.get() - before[1] == NUM_LAYERS * 2 * (top_k // 2)


async def test_batches_under_way_together_are_shared_out_with_regard_to_each_other(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        await c.check()
        told: list[Terms] = []

        def note(answer: Any) -> Any:
            async def noting(request: Frame) -> Frame:
                told.append(Terms.decode(request.tensors[1], 2))
                return await answer(request)

            return noting

        for network, host in zip(c.networks, c.hosts, strict=True):
            for link in network._links._served:
                link._handler = note(host.answer)
        step = c.routed.begin_step()
        batches = [torch.randn(4, 32) for _ in range(3)]
        for layer in range(2):
            together = await asyncio.gather(
                *(c.routed.dispatch(step, layer, rows) for rows in batches)
            )
        again = await asyncio.gather(*(c.routed.dispatch(step, 1, rows) for rows in batches))
        await c.routed.dispatch(step, 1, batches[0])
        c.routed.end_step(step)

        assert c.routed._under_way == []
        loads = [terms.load for terms in told]
        # Of each layer for the first time: nothing is known, and the first has nobody before it.
        assert loads[:12] == 2 * [None, None, (0, 0), (0, 0), (0, 0), (0, 0)]
        assert loads[12:14] == [None, None]
        assert all(load is not None and sum(load) > 0 for load in loads[14:18])
        assert loads[14] == loads[15]
        assert loads[16] == loads[17]
        assert sum(loads[16]) == 2 * sum(loads[14])
        assert loads[18:] == [None, None]
        for rows, combined, more in zip(batches, together, again, strict=True):
            expected = await c.local.dispatch(c.local.begin_step(), 1, rows)
            torch.testing.assert_close(combined, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(more, expected, rtol=1e-5, atol=1e-5)


async def test_by_the_placement_alone_no_bit_of_a_row_depends_on_its_company(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 3, scheduling="static") as c:
        c.put_in_force(c.placement(1, EVERYTHING, [0, 1, 2, 3], [7, 2, 5, 4, 6]))
        await asyncio.wait_for(c.routed.reachable(), 5)
        step = c.routed.begin_step()
        rows = torch.randn(24, 32)

        whole = await c.routed.dispatch(step, 1, rows)
        parts = await asyncio.gather(
            *(c.routed.dispatch(step, 1, part) for part in rows.split([1, 6, 17]))
        )

        assert torch.equal(torch.cat(parts), whole)
        c.routed.end_step(step)


async def test_a_worker_without_a_share_answers_without_rows(tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        routing = [torch.ones(3, 2), torch.full((3, 2), 5, dtype=torch.int32)]
        terms = Terms("aebs", (0, 1), (0, 9)).encode()
        request = Frame(
            kind=FrameKind.REQUEST, epoch=1, tensors=[torch.randn(3, 32), terms, *routing]
        )

        one, other = [await host.answer(request) for host in c.hosts]

        assert one.digest == other.digest
        assert [list(t.shape) for t in one.tensors] == [[3, 32], [1, 2]]
        assert [list(t.shape) for t in other.tensors] == [[0, 32], [1, 2]]
        assert one.tensors[1].tolist() == other.tensors[1].tolist() == [[1, 9]]


ROUTING = [torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)]


@pytest.mark.parametrize(
    ("field", "tensors"),
    [
        ("tensors[1]", [torch.tensor([[0, 0, 7]])]),
        ("tensors[1]", [torch.tensor([[0, 0, 1], [0, -3, 0]])]),
        ("tensors[1]", [torch.tensor([[0, 1]], dtype=torch.int32)]),
        ("tensors[2]", [Terms("aebs", (0,)).encode(), ROUTING[0][:2], ROUTING[1]]),
        ("tensors[2]", [Terms("aebs", (0,)).encode(), ROUTING[0].double(), ROUTING[1]]),
        ("tensors[3]", [Terms("aebs", (0,)).encode(), ROUTING[0], ROUTING[1][:, :1]]),
        ("tensors[3]", [Terms("aebs", (0,)).encode(), ROUTING[0], ROUTING[1].long()]),
        ("tensors[3]", [Terms("aebs", (0,)).encode(), ROUTING[0], ROUTING[1] + 8]),
        ("tensors[3]", [Terms("aebs", (0,)).encode(), ROUTING[0], ROUTING[1] - 1]),
        ("layer", [Terms("aebs", (0,)).encode(), ROUTING[0]]),
    ],
)
async def test_a_request_that_is_none_is_refused_by_field(
    tiny_model: Any, field: str, tensors: list[torch.Tensor]
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, EVERYTHING, EVERYTHING))
        request = Frame(kind=FrameKind.REQUEST, epoch=1, tensors=[torch.randn(3, 32), *tensors])

        with pytest.raises(InvalidInput) as refused:
            await c.hosts[0].answer(request)

    assert refused.value.field == f"frame.{field}"


def test_preparing_again_loads_nothing_and_a_move_loads_only_what_is_missing(
    tiny_model: Any,
) -> None:
    c = Cluster(tiny_model, 1, slots=4)
    c.addresses = ["nowhere", "nowhere"]
    host = c.hosts[0]

    first = host.prepare(c.placement(1, [0, 1, 2, 3], [4, 5, 6, 7]))
    again = host.prepare(c.placement(1, [0, 1, 2, 3], [4, 5, 6, 7]))
    host.commit(1)
    moved = host.prepare(c.placement(2, [0, 1, 2, 7], [4, 5, 6, 3]))

    assert (first.loaded, first.kept) == (4 * NUM_LAYERS, 0)
    assert (again.loaded, again.kept) == (0, 4 * NUM_LAYERS)
    assert (moved.loaded, moved.kept) == (NUM_LAYERS, 3 * NUM_LAYERS)
    assert host.epoch == 1
    host.abort(2)
    with pytest.raises(NotReady):
        host.commit(2)


def test_a_placement_that_does_not_fit_is_refused_by_field(tiny_model: Any) -> None:
    c = Cluster(tiny_model, 1, slots=4)
    c.addresses = ["nowhere", "nowhere"]
    host = c.hosts[0]

    with pytest.raises(InvalidInput, match=r"slots: .* 8 slots"):
        host.prepare(c.placement(1, list(range(8))))
    host.prepare(c.placement(3, *HALVES))
    host.commit(3)
    with pytest.raises(StaleEpoch):
        host.prepare(c.placement(2, *HALVES))
    with pytest.raises(StaleEpoch):
        host.commit(2)


async def test_an_epoch_in_force_cannot_become_another_placement(tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))

        c.hosts[0].prepare(c.placement(1, *HALVES))
        with pytest.raises(StaleEpoch):
            c.hosts[0].prepare(c.placement(1, *reversed(HALVES)))
        assert await c.check() == 1


async def test_workers_with_different_placements_of_one_epoch_are_not_added_up(
    tiny_model: Any,
) -> None:
    async with cluster(tiny_model, 2) as c:
        c.hosts[0].prepare(c.placement(1, *HALVES))
        c.hosts[1].prepare(c.placement(1, *reversed(HALVES)))
        c.routed.set_placement(c.placement(1, *HALVES))

        with pytest.raises(ExpertUnavailable, match="different placements"):
            await c.check()
