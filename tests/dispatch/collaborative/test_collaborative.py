import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from moesaic.brownout.split import Level
from moesaic.dispatch.collaborative import metrics
from moesaic.errors import ExpertUnavailable
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import value_of
from tests.waiting import until

HALVES = [0, 1, 2, 3], [4, 5, 6, 7]


class TestCollaborative(
    contract.DispatcherContract,
    contract.OwnStepsContract,
    contract.BatchesAtOnceContract,
    contract.RemoteContract,
):
    deterministic = False

    @pytest.fixture
    async def opened(self, sites: Any, tiny_model: Any) -> AsyncIterator[contract.Opened]:
        async with sites(tiny_model, 2, deterministic=self.deterministic) as s:
            s.put_in_force(s.placement(1, *HALVES))
            await s.linked()
            dispatcher, lose = s.sites[0].dispatcher, s.sites[1].served.close
            yield contract.Opened(
                dispatcher, s.local, s.config, self.deterministic, lose, "agent-1"
            )

    @pytest.fixture
    async def unreached(self, sites: Any, tiny_model: Any) -> AsyncIterator[contract.Unreached]:
        async with sites(tiny_model, 2, deterministic=self.deterministic) as s:

            async def come() -> None:
                s.put_in_force(s.placement(1, *HALVES))

            yield contract.Unreached(s.sites[0].dispatcher, "a placement from the scheduler", come)


class TestCollaborativeOneByOne(TestCollaborative):
    """Sums that have the bits of local ones."""

    deterministic = True


@pytest.mark.parametrize("rows", [1, 7, 200])
async def test_deterministic_sites_give_the_bits_of_local_whoever_serves(
    tiny_model: Any, sites: Any, rows: int
) -> None:
    async with sites(tiny_model, 3, deterministic=True, files=True) as s:
        s.put_in_force(s.placement(1, [0, 1, 2], [2, 3, 4], [5, 6, 7]))
        await s.linked()

        for n in range(3):
            await s.check(n, rows, has_bits=True)


async def test_a_site_that_holds_everything_asks_nobody(tiny_model: Any, sites: Any) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, list(range(8)), [0]))
        await s.linked()
        before = value_of(metrics.CHOICES, "remote")

        await s.check(0)

        assert value_of(metrics.CHOICES, "remote") == before


async def test_without_a_placement_files_serve(tiny_model: Any, sites: Any) -> None:
    async with sites(tiny_model, 1, files=True) as s:
        await s.check(0)

        assert s.sites[0].dispatcher.begin_step().epoch == 0
        assert s.sites[0].files.num_held == 4  # no more than there is room for


async def test_a_bandwidth_that_nothing_has_measured_is_not_told(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES))
        await s.linked()
        await s.check(0)
        peers = s.sites[0].peers
        assert peers.profiles() == {}

        probing = asyncio.create_task(peers.probe())
        await until(peers.profiles)
        probing.cancel()
        assert list(peers.profiles()) == ["agent-1"]


async def test_another_holder_serves_when_one_is_gone(tiny_model: Any, sites: Any) -> None:
    async with sites(tiny_model, 3) as s:
        s.put_in_force(s.placement(1, [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]))
        await s.linked()
        await s.sites[1].served.close()

        await s.check(0)


async def test_files_serve_when_the_last_holder_is_gone(tiny_model: Any, sites: Any) -> None:
    async with sites(tiny_model, 2, files=True) as s:
        s.put_in_force(s.placement(1, *HALVES))
        await s.linked()
        await s.sites[1].served.close()

        await s.check(0)


async def test_rows_that_may_be_degraded_do_without_lost_experts(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES, substitution=Substitution(instead="fewer")))
        await s.linked()
        await s.sites[1].served.close()
        dispatcher = s.sites[0].dispatcher
        await until(lambda: not s.sites[0].peers.live(dispatcher.view))

        step = dispatcher.begin_step()
        promised = PromisedRows([Level(0.5)], [0] * 9, num_layers=s.config.num_layers)
        out = await dispatcher.dispatch(
            step, 0, torch.randn(9, s.config.hidden_size), promised.enter(0)
        )

        assert step.has_lost
        assert out.isfinite().all()
        assert int(promised.settle().sum()) > 0
        dispatcher.end_step(step)


async def test_a_holder_lost_in_the_middle_of_a_step_degrades_no_exact_row(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES, substitution=Substitution(instead="fewer")))
        await s.linked()
        dispatcher = s.sites[0].dispatcher
        step = dispatcher.begin_step()
        assert not step.has_lost
        await s.sites[1].served.close()
        await until(lambda: not s.sites[0].peers.linked_to(dispatcher.view))

        exact_and_not = PromisedRows([Level(1.0), Level(0.5)], [0, 1] * 20)
        rows = torch.randn(40, s.config.hidden_size)
        with pytest.raises(ExpertUnavailable):
            await dispatcher.dispatch(step, 0, rows, exact_and_not.enter(0))
        dispatcher.end_step(step)


async def test_a_step_keeps_its_placement_while_another_comes_in_force(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES))
        await s.linked()
        dispatcher = s.sites[0].dispatcher
        step = dispatcher.begin_step()
        s.put_in_force(s.placement(2, *reversed(HALVES)))
        hidden = torch.randn(5, s.config.hidden_size)

        old = await dispatcher.dispatch(step, 0, hidden)
        dispatcher.end_step(step)
        newer = dispatcher.begin_step()
        new = await dispatcher.dispatch(newer, 0, hidden)

        assert (step.epoch, newer.epoch) == (1, 2)
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-5)


async def test_a_peer_that_has_not_heard_of_the_epoch_answers_it(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES))
        await s.linked()
        second = s.placement(2, *reversed(HALVES))
        for site in s.sites:
            site.host.loader.prepare(second)
        s.sites[0].host.epochs.commit(2)  # the other one will hear of it later

        await s.check(0)


async def test_choices_of_this_site_are_counted_and_those_of_others_are_not(
    tiny_model: Any, sites: Any
) -> None:
    async with sites(tiny_model, 2) as s:
        s.put_in_force(s.placement(1, *HALVES))
        await s.linked()

        await s.check(0, rows=7)

        told = [
            site.meter.report(worker_id="", generation=1, model_digest="", epoch=1)
            for site in s.sites
        ]
        assert [layer.rows for layer in told[0].window.layers] == [7] * len(s.config.moe_layers)
        assert told[1].window.layers == []
