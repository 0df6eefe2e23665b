"""The promises of ``moesaic.dispatch.contract``: a class of tests for each, which every dispatcher passes.

A test file of an implementation has subclasses of those that hold for it, with fixtures that open it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import ExpertUnavailable, NotReady
from moesaic.models.configuration.config import ModelConfig
from tests.waiting import until


@dataclass
class Opened:
    """A dispatcher whose experts can be reached, and the exact reference.

    Attributes:
        has_bits: sums have the bits of the reference; else they are added up in another order.
        lose: takes a worker away without which some expert is missing.
        lost: names it, for people.
    """

    dispatcher: Dispatcher
    reference: LocalDispatcher
    config: ModelConfig
    has_bits: bool = False
    lose: Callable[[], Awaitable[object]] | None = None
    lost: str = ""

    def rows(self, count: int, layer: int = 0, seed: int = 0) -> Tensor:
        """Hidden states, the same for the same numbers."""
        generator = torch.Generator().manual_seed(1000 * seed + 10 * count + layer)
        return torch.randn(count, self.config.hidden_size, generator=generator)

    async def check(self, step: Step, layer: int, hidden: Tensor) -> None:
        """Dispatch some rows; the result is that of the reference."""
        got = await self.dispatcher.dispatch(step, layer, hidden)
        expected = await self.reference.dispatch(self.reference.begin_step(), layer, hidden)
        assert got.dtype == hidden.dtype
        tolerance = 0.0 if self.has_bits else 1e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    async def step(self, rows: int = 5, layers: Sequence[int] | None = None) -> None:
        """Run a step, of all layers or of these."""
        step = self.dispatcher.begin_step()
        try:
            for layer in self.config.moe_layers if layers is None else layers:
                await self.check(step, layer, self.rows(rows, layer))
        finally:
            self.dispatcher.end_step(step)


@dataclass
class Unreached:
    """A dispatcher that can reach no experts yet.

    Attributes:
        waits_for: names what is missing, for people.
        come: brings it.
    """

    dispatcher: Dispatcher
    waits_for: str
    come: Callable[[], Awaitable[object]]


class DispatcherContract:
    """Every dispatcher."""

    @pytest.fixture
    def opened(self) -> Opened:
        """The dispatcher; a step may begin."""
        raise NotImplementedError

    @pytest.mark.parametrize("rows", [1, 2, 64, 300])
    async def test_any_number_of_rows_gives_the_sums_of_local_experts(
        self, opened: Opened, rows: int
    ) -> None:
        await opened.step(rows)
        await opened.step(rows)

    async def test_the_last_layer_may_have_fewer_rows(self, opened: Opened) -> None:
        *others, last = opened.config.moe_layers
        step = opened.dispatcher.begin_step()

        for layer in others:
            await opened.check(step, layer, opened.rows(9, layer))
        await opened.check(step, last, opened.rows(1, last))

        opened.dispatcher.end_step(step)

    async def test_where_a_step_can_begin_nothing_is_waited_for(self, opened: Opened) -> None:
        await opened.dispatcher.reachable()

        assert opened.dispatcher.waiting_for == []
        step = opened.dispatcher.begin_step()
        assert len(step.step_id) == 16
        opened.dispatcher.end_step(step)

    async def test_a_step_that_never_started_is_ended_as_well(self, opened: Opened) -> None:
        opened.dispatcher.end_step(opened.dispatcher.begin_step())

        await opened.step()


class OwnStepsContract:
    """Dispatchers whose workers step by themselves: a step that ends early keeps nobody waiting."""

    async def test_a_step_that_ended_early_leaves_the_next_ones_whole(self, opened: Opened) -> None:
        for count in (1, 2, None, 2, None):
            await opened.step(layers=opened.config.moe_layers[:count])

    async def test_a_step_that_was_cancelled_leaves_the_next_ones_whole(
        self, opened: Opened
    ) -> None:
        first, dispatcher = opened.config.moe_layers[0], opened.dispatcher
        for turns in (0, 3):
            step = dispatcher.begin_step()
            dispatching = asyncio.ensure_future(dispatcher.dispatch(step, first, opened.rows(5)))
            for _ in range(turns):
                await asyncio.sleep(0)
            dispatching.cancel()
            await asyncio.gather(dispatching, return_exceptions=True)
            dispatcher.end_step(step)

            await dispatcher.reachable()
            await opened.step()


class BatchesAtOnceContract:
    """Dispatchers that may have several batches under way."""

    async def test_batches_of_one_step_may_be_under_way_at_once(self, opened: Opened) -> None:
        step = opened.dispatcher.begin_step()

        for layer in opened.config.moe_layers:
            batches = (opened.rows(count, layer) for count in (4, 1, 17))
            await asyncio.gather(*(opened.check(step, layer, rows) for rows in batches))

        opened.dispatcher.end_step(step)

    async def test_steps_may_be_under_way_at_once_and_end_in_any_order(
        self, opened: Opened
    ) -> None:
        first, *others = opened.config.moe_layers
        one, other = opened.dispatcher.begin_step(), opened.dispatcher.begin_step()
        await asyncio.gather(*(opened.check(step, first, opened.rows(3)) for step in (one, other)))

        opened.dispatcher.end_step(one)

        for layer in others:
            await opened.check(other, layer, opened.rows(3, layer))
        opened.dispatcher.end_step(other)


class RemoteContract:
    """Dispatchers whose experts are in other processes, which come and go."""

    @pytest.fixture
    def unreached(self) -> Unreached:
        """The dispatcher; no step can begin."""
        raise NotImplementedError

    async def test_where_no_step_can_begin_it_is_said_why(self, unreached: Unreached) -> None:
        assert any(unreached.waits_for in reason for reason in unreached.dispatcher.waiting_for)
        with pytest.raises(NotReady, match=unreached.waits_for):
            unreached.dispatcher.begin_step()

    async def test_a_step_is_waited_for_until_it_can_begin(self, unreached: Unreached) -> None:
        reached = asyncio.ensure_future(unreached.dispatcher.reachable())
        await asyncio.sleep(0)
        assert not reached.done()

        await unreached.come()

        await reached
        assert unreached.dispatcher.waiting_for == []
        unreached.dispatcher.end_step(unreached.dispatcher.begin_step())

    async def test_a_lost_worker_fails_the_step_and_is_waited_for(self, opened: Opened) -> None:
        assert opened.lose is not None
        dispatcher, layer = opened.dispatcher, opened.config.moe_layers[0]
        await opened.step()
        step = dispatcher.begin_step()
        await opened.lose()

        with pytest.raises(ExpertUnavailable) as failed:
            await dispatcher.dispatch(step, layer, opened.rows(40))

        assert failed.value.layer == layer
        dispatcher.end_step(step)
        await until(lambda: dispatcher.waiting_for)
        assert any(opened.lost in reason for reason in dispatcher.waiting_for)
        with pytest.raises(NotReady):
            dispatcher.begin_step()
