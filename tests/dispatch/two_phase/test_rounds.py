"""Rounds hold what was offered for one layer, wait for those who should come, and for nobody else."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moesaic.dispatch.route import Route
from moesaic.dispatch.two_phase import waiting
from moesaic.dispatch.two_phase.rounds import Contribution, Rounds
from moesaic.dispatch.two_phase.waiting import RoundWaits
from moesaic.errors import ExpertUnavailable, MoesaicError, NotReady
from moesaic.messages.placement import Placement
from tests.dispatch.two_phase.conftest import await_at_first_layers

PLACEMENT = Placement(epoch=1, model_digest="", num_experts=1, workers=[], layers=[0, 1], slots=[])


def route(live: tuple[int, ...] = (0,), layers: Sequence[int] = (0, 1)) -> Route:
    return Route(PLACEMENT, live, {}, dict.fromkeys(layers, (0,)), {}, {}, {})


@dataclass
class Sends:
    """Doubles every row, and remembers who came together."""

    rounds: list[tuple[int, list[str]]] = field(default_factory=list)
    error: Exception | None = None

    async def __call__(self, layer: int, members: Sequence[Contribution]) -> torch.Tensor:
        self.rounds.append((layer, [each.worker_id for each in members]))
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        return 2 * torch.cat([each.hidden for each in members])


def offer(worker_id: str, value: float, rows: int = 2, at: Route | None = None) -> Contribution:
    return Contribution(worker_id, torch.full((rows, 4), value), at or route())


async def together(made: Rounds, layer: int = 0) -> None:
    """Two workers are offered side by side; both get their own rows back."""
    b, a = await asyncio.gather(
        made.join(layer, offer("b", 2.0)), made.join(layer, offer("a", 1.0))
    )
    assert torch.equal(b, torch.full((2, 4), 4.0))
    assert torch.equal(a, torch.full((2, 4), 2.0))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that wait for somebody wait for ever: a test that needs patience to end would hang."""
    monkeypatch.setattr(waiting, "_PATIENCE_S", (3600.0, 3600.0))


async def meet(made: Rounds) -> None:
    """Both are waited for at the first layer from now on."""
    await_at_first_layers(made.waits, "ab")
    await together(made)


@pytest.mark.usefixtures("patient")
async def test_rows_leave_in_the_order_of_workers_and_sums_find_their_way() -> None:
    sends = Sends()
    made = Rounds(sends, 100)

    await meet(made)
    await together(made, layer=1)

    assert sends.rounds == [(0, ["a", "b"]), (1, ["a", "b"])]


@pytest.mark.usefixtures("patient")
async def test_a_worker_nobody_knows_is_not_kept_waiting() -> None:
    sends = Sends()

    await Rounds(sends, 100).join(0, offer("a", 1.0))

    assert sends.rounds == [(0, ["a"])]


async def test_who_stays_away_is_waited_for_once() -> None:
    sends = Sends()
    made = Rounds(sends, 100)
    await meet(made)

    await made.join(0, offer("a", 1.0))

    assert made.waits.regulars == {"a"}


@pytest.mark.usefixtures("patient")
async def test_rows_that_go_directly_are_not_waited_for() -> None:
    sends = Sends()
    made = Rounds(sends, 100)
    await_at_first_layers(made.waits, "ab")
    asking = asyncio.ensure_future(made.join(0, offer("a", 1.0)))
    await asyncio.sleep(0)
    assert not sends.rounds

    made.pass_by("b")

    await asking
    assert sends.rounds == [(0, ["a"])]


@pytest.mark.usefixtures("patient")
async def test_who_is_a_layer_ahead_is_not_waited_for() -> None:
    sends = Sends()
    made = Rounds(sends, 100)
    at = route(layers=(0, 1, 2))
    await_at_first_layers(made.waits, "ab")
    await asyncio.gather(made.join(0, offer("a", 1.0, at=at)), made.join(0, offer("b", 1.0, at=at)))
    behind = asyncio.ensure_future(made.join(1, offer("a", 1.0, at=at)))
    ahead = asyncio.ensure_future(made.join(2, offer("b", 1.0, at=at)))

    await behind
    await asyncio.gather(made.join(2, offer("a", 1.0, at=at)), ahead)  # a has caught up

    assert sends.rounds[1:] == [(1, ["a"]), (2, ["a", "b"])]


@pytest.mark.usefixtures("patient")
async def test_who_leaves_the_node_holds_up_nobody() -> None:
    sends = Sends()
    made = Rounds(sends, 100)
    await meet(made)
    waiting = asyncio.ensure_future(made.join(0, offer("a", 1.0)))
    await asyncio.sleep(0)

    made.keep("a")

    await waiting
    assert sends.rounds[-1] == (0, ["a"])


@pytest.mark.usefixtures("patient")
async def test_rows_for_other_experts_or_too_many_go_in_rounds_of_their_own() -> None:
    sends = Sends()
    made = Rounds(sends, 5)
    await_at_first_layers(made.waits, "abc")
    joins = [
        made.join(0, offer("a", 1.0, rows=3)),
        made.join(0, offer("b", 1.0, rows=3)),
        made.join(0, offer("c", 1.0, rows=1, at=route(live=(0, 1)))),
    ]
    asking = [asyncio.ensure_future(join) for join in joins]
    await asyncio.sleep(0)
    made.keep("")

    await asyncio.gather(*asking)

    assert sorted(sends.rounds) == [(0, ["a"]), (0, ["b"]), (0, ["c"])]


async def test_a_failure_reaches_everybody_in_the_round_and_nobody_else() -> None:
    sends = Sends(error=ExpertUnavailable(0))
    made = Rounds(sends, 100)
    await_at_first_layers(made.waits, "ab")

    failed = await asyncio.gather(
        made.join(0, offer("a", 1.0)), made.join(0, offer("b", 1.0)), return_exceptions=True
    )

    assert [type(error) for error in failed] == [ExpertUnavailable] * 2
    sends.error = None
    await together(made)


@pytest.mark.usefixtures("patient")
async def test_closing_ends_what_waits() -> None:
    made = Rounds(Sends(), 100)
    await_at_first_layers(made.waits, "ab")
    waiting = asyncio.ensure_future(made.join(0, offer("a", 1.0)))
    await asyncio.sleep(0)

    await made.close()

    with pytest.raises(NotReady):
        await waiting


@pytest.mark.usefixtures("patient")
async def test_two_offers_of_one_worker_are_no_company() -> None:
    made = Rounds(Sends(), 100)
    await_at_first_layers(made.waits, "b")
    offers = [offer("a", 1.0), offer("a", 2.0)]
    joins = asyncio.gather(*(made.join(0, each) for each in offers))
    await asyncio.sleep(0)

    made.keep("a")

    await joins
    assert [each.members for each in offers] == [1, 1]


@pytest.mark.usefixtures("patient")
async def test_nothing_is_kept_of_those_who_left_the_node() -> None:
    made = Rounds(Sends(), 100)
    await meet(made)
    await together(made, layer=1)
    made.waits.left(True, frozenset("a"), "b")  # b stayed away for once, and then left

    made.keep("a")

    assert made.waits.regulars == {"a"}
    assert [made.waits.awaited(name, first=False) for name in "ab"] == [{"a"}, set()]
    await made.join(1, offer("a", 1.0))  # waits for nobody


async def test_a_failure_of_any_kind_ends_its_round_and_no_task_dies_of_it() -> None:
    died: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: died.append(context))
    sends = Sends(error=RuntimeError("of any kind"))
    made = Rounds(sends, 100)

    with pytest.raises(MoesaicError):
        await made.join(0, offer("a", 1.0))

    sends.error = None
    await made.join(0, offer("a", 1.0))
    gc.collect()
    await asyncio.sleep(0)
    assert not died


def test_who_keeps_another_pace_is_waited_for_ever_more_seldom() -> None:
    """A short step waited for the one who is in a long step, each time that had begun another."""
    waits, waited = RoundWaits(), 0
    await_at_first_layers(waits, "ab")

    for _ in range(100):  # b comes when a has just gone
        missed = waits.awaited("a", first=True) - {"a"}
        waited += "b" in missed
        await_at_first_layers(waits, "a")
        waits.left(True, frozenset("a"), missed)
        await_at_first_layers(waits, "b")
        waits.left(True, frozenset("b"), ())

    assert 3 <= waited <= 9


async def test_who_meets_again_is_a_regular_again() -> None:
    made = Rounds(Sends(), 100)
    for _ in range(7):
        made.waits.left(True, frozenset("a"), "b")
    await_at_first_layers(made.waits, "ab")
    assert made.waits.regulars == {"a"}

    b = asyncio.ensure_future(made.join(0, offer("b", 1.0)))
    await asyncio.sleep(0)
    await asyncio.gather(b, made.join(0, offer("a", 1.0)))

    assert made.waits.regulars == {"a", "b"}
    # It is missed as for the first time: nothing is held against it.
    made.waits.left(True, frozenset("a"), "b")
    await_at_first_layers(made.waits, "b")
    assert "b" in made.waits.regulars


def test_patience_comes_from_steps_and_not_from_the_pauses_between_them() -> None:
    """After a pause, everybody was waited for as long as that."""
    waits = RoundWaits()
    waits.came("a", 10.0, first=True, last=False)
    waits.came("a", 10.5, first=False, last=True)
    learned_s = waits.step_s

    waits.came("a", 13.0, first=True, last=False)

    assert waits.step_s == learned_s == 0.5
