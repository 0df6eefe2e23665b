"""Whatever a solver does, the scheduler goes on, and nothing unchecked is proposed."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.common.placements import placed_worker
from moesaic.errors import DeadlineExceeded, MoesaicError, NotReady
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.policies.uniform import uniform
from moesaic.placement.traffic.origins import OriginTraffic
from moesaic.placement.traffic.statistics import LayerTraffic, Statistics
from moesaic.services.scheduler.planning import solver as solving_process
from moesaic.services.scheduler.planning.messages import (
    Replay,
    Replayed,
    SentTraffic,
    Solve,
    Solved,
)
from moesaic.services.scheduler.planning.planner import Planner
from moesaic.services.scheduler.planning.solver_client import COMMAND, Solver, solver
from moesaic.services.scheduler.planning.traffic import ModelTraffic

NUM_EXPERTS = 8
CURRENT = Placement(
    epoch=5,
    model_digest="m",
    num_experts=NUM_EXPERTS,
    workers=[placed_worker(f"w{n}") for n in range(3)],
    layers=[0, 1],
    slots=[[[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]] * 2,
)
RECORDS = [
    WorkerRecord(
        worker_id=f"w{n}",
        generation=1,
        role="expert",
        state="ready",
        admin_address="",
        model_digest="m",
        slots_per_layer=4,
        num_experts=NUM_EXPERTS,
        layers=[0, 1],
        expert_bytes=100,
    )
    for n in range(3)
]
HOT = LayerTraffic.of_batches([np.array([[4, 5], [6, 7]])] * 40, NUM_EXPERTS)


class Feed:
    """Traffic that was seen: none of the others, only the hot experts."""

    def __init__(self, traffic: LayerTraffic = HOT) -> None:
        statistics = Statistics(NUM_EXPERTS, {0: traffic, 1: traffic})
        self.traffic: ModelTraffic | None = ModelTraffic(
            statistics, 0.0, OriginTraffic(NUM_EXPERTS, [0, 1], 300.0)
        )

    def of(self, model_digest: str) -> ModelTraffic | None:
        assert model_digest == "m"
        return self.traffic


def saying(*answers: Any, then: str = "") -> tuple[str, ...]:
    """A solver's command that gives these answers, whatever it is asked, and then runs code."""
    code = (
        "import struct, sys, time\n"
        "out = sys.stdout.buffer\n"
        "out.write(b'R'); out.flush()\n"
        f"for answer in {[msgspec.msgpack.encode(answer) for answer in answers]!r}:\n"
        "    sys.stdin.buffer.read(struct.unpack('<I', sys.stdin.buffer.read(4))[0])\n"
        "    out.write(struct.pack('<I', len(answer)) + answer); out.flush()\n"
        "sys.stdin.buffer.read(4)\n"
        f"{then}\n"
    )
    return sys.executable, "-c", code


NEVER_ENDS, CRASHES = "time.sleep(600)", "raise SystemExit(1)"
GARBAGE = "out.write(struct.pack('<I', 3) + b'abc'); out.flush(); time.sleep(600)"
TOO_LONG = "out.write(struct.pack('<I', 2**31)); out.flush(); time.sleep(600)"
QUESTION = Solve(policy="eplb", slots=[4], held=[], traffic=[], expert_bytes=1)


class FirstThenReal(Solver):
    """A solver of one command until that fails or is ended, and a real one from then on."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        super().__init__(COMMAND, 60.0)
        self._first: Solver | None = Solver(command, limit_s)

    async def ask(self, question: Any) -> Any:
        if self._first is None:
            return await super().ask(question)
        try:
            return await self._first.ask(question)
        except MoesaicError:
            await self.end()
            raise

    async def end(self) -> None:
        if self._first is not None:
            await self._first.end()
            self._first = None
        await super().end()


@asynccontextmanager
async def first_then_real(
    command: Sequence[str], limit_s: float = 60.0
) -> AsyncIterator[FirstThenReal]:
    asked = FirstThenReal(command, limit_s)
    try:
        yield asked
    finally:
        await asked.end()


async def plan(start: Any, policy: str = "janus-batches", feed: Any = None, **changes: Any) -> Any:
    planner = Planner(feed or Feed(), start)
    records = [msgspec.structs.replace(record, **changes) for record in RECORDS]
    return await planner.plan(CURRENT, records, policy, [], 1000.0)


@pytest.mark.parametrize("policy", ["auto", "eplb", "janus-batches"])
async def test_a_real_solver_spreads_hot_experts_and_moves_few(policy: str) -> None:
    made = await plan(partial(solver, limit_s=60.0), policy)

    assert made.worthwhile
    assert (made.before, made.sampled_batches) == (4, 40)
    assert made.after == 2
    assert made.base_epoch == 5
    assert made.moved_bytes == 100 * len(made.moves) > 0
    assert made.seconds == made.moved_bytes / 1000.0


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (NEVER_ENDS, DeadlineExceeded),
        (CRASHES, NotReady),
        (GARBAGE, NotReady),
        (TOO_LONG, NotReady),
    ],
)
async def test_a_solver_that_gives_no_answer_is_ended(end: str, error: type[MoesaicError]) -> None:
    async with solver(saying(then=end), 0.3) as asked:
        with pytest.raises(error):
            await asked.ask(QUESTION)
        assert asked._process is None


async def test_a_policy_that_computes_for_ever_ends_by_itself(tmp_path: Path) -> None:
    code = (
        "from moesaic.services.scheduler.planning import solver\n"
        "solver.CPU_S = 0.2\n"
        "def answer(question):\n"
        "    while True: pass\n"
        "solver.answer = answer\n"
        "solver.main()\n"
    )
    async with solver((sys.executable, "-c", code), 60.0) as asked:
        with pytest.raises(NotReady, match="no answer"):
            await asked.ask(QUESTION)


async def test_a_solver_that_does_not_start_is_said_so() -> None:
    for command in (("/no/such/program",), (sys.executable, "-c", "")):
        async with solver(command) as asked:
            with pytest.raises(NotReady, match="does not start"):
                await asked.ask(QUESTION)


MEANS = Replayed(activated=[4.0, 1.0], loads=[4.0, 1.0], batches=80)
DUPLICATE = [[[0, 0, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]] * 2
MISSING = [[[0, 1, 2, 3], [4, 5, 6, 6], [0, 1, 2, 3]]] * 2
TOO_MANY = [[[0, 1, 2, 3, 4], [4, 5, 6, 7], [0, 1, 2, 3]]] * 2
ONE_LAYER = [[[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]]
UNKNOWN = [[[0, 1, 2, 99], [4, 5, 6, 7], [0, 1, 2, 3]]] * 2


@pytest.mark.parametrize("slots", [DUPLICATE, MISSING, TOO_MANY, ONE_LAYER, UNKNOWN])
async def test_a_wrong_answer_is_refused_and_the_greedy_policy_asked(
    slots: Any,
) -> None:
    made = await plan(partial(first_then_real, saying(Solved(slots=slots))))

    assert (made.policy, made.worthwhile) == ("eplb", True)


async def test_a_policy_that_never_ends_gives_way_to_the_greedy_one() -> None:
    made = await plan(partial(first_then_real, saying(then=NEVER_ENDS), 0.3))

    assert (made.policy, made.worthwhile, made.after) == ("eplb", True, 2)


async def test_of_several_policies_one_that_fails_does_not_stop_the_others() -> None:
    made = await plan(partial(first_then_real, saying(then=CRASHES)), "auto")

    assert made.policy in ("eplb-batches", "janus-batches")  # eplb was asked first
    assert made.worthwhile


async def test_if_nothing_answers_experts_stay() -> None:
    made = await plan(partial(solver, saying(then=CRASHES)))

    assert (made.worthwhile, made.moves, made.placement.slots) == (False, [], CURRENT.slots)
    assert "no answer" in made.reason


async def test_a_proposal_that_brings_nothing_or_too_little_is_not_carried_out() -> None:
    other = [[[4, 1, 2, 3], [0, 5, 6, 7], [0, 1, 2, 3]]] * 2
    worse = saying(
        Solved(slots=other), Replayed(activated=[4.0, 3.95], loads=[4.0, 3.95], batches=80)
    )
    few = saying(Solved(slots=other), Replayed(activated=[4.0, 1.0], loads=[4.0, 1.0], batches=8))
    same = saying(Solved(slots=CURRENT.slots), MEANS)

    assert not (made := await plan(partial(solver, worse))).worthwhile
    assert made.reason == "predicted gain 1.2%, at least 3.0% is wanted"
    assert not (made := await plan(partial(solver, few))).worthwhile
    assert made.reason == "only 8 batches were sampled, 32 are needed"
    assert not (made := await plan(partial(solver, same))).worthwhile
    assert made.reason == "nothing better than what is there was found"


async def test_without_room_for_old_experts_only_as_many_layers_change_as_fit() -> None:
    tight = {"max_expert_bytes": 1100}  # eight experts, and three more: one layer's moves
    made = await plan(partial(solver, limit_s=60.0), "eplb", **tight)

    assert {move.layer for move in made.moves} == {0}
    none = await plan(partial(solver, limit_s=60.0), "eplb", max_expert_bytes=800)
    assert none.moves == []
    assert "would hold" in none.reason


async def test_without_traffic_or_with_the_policy_keep_nothing_is_asked() -> None:
    silent = Feed()
    silent.traffic = None

    assert (await plan(None, feed=silent)).reason == "no traffic has been seen yet"
    assert "keep" in (await plan(None, "keep")).reason


async def test_traffic_travels_as_it_is() -> None:
    back = SentTraffic.of(HOT).layer()

    for name in ("tokens", "active_batches", "coactivation", "sampled"):
        np.testing.assert_array_equal(getattr(back, name), getattr(HOT, name))
    assert (back.rows, back.batches) == (HOT.rows, HOT.batches)
    assert Replay(placements=[], traffic=[SentTraffic.of(HOT)])


async def test_any_gain_will_do_where_none_in_particular_is_wanted() -> None:
    other = [[[4, 1, 2, 3], [0, 5, 6, 7], [0, 1, 2, 3]]] * 2

    async def made_of(loads: list[float]) -> Any:
        answers = Solved(slots=other), Replayed(activated=loads, loads=loads, batches=80)
        planner = Planner(Feed(), partial(solver, saying(*answers)), least_gain=0.0)
        return await planner.plan(CURRENT, RECORDS, "janus-batches", [], None)

    assert (await made_of([4.0, 3.99])).worthwhile
    assert not (await made_of([4.0, 4.0])).worthwhile


async def test_what_counts_is_work_as_workers_reckon_it_not_the_number_of_experts() -> None:
    other = [[[4, 1, 2, 3], [0, 5, 6, 7], [0, 1, 2, 3]]] * 2
    answers = Solved(slots=other), Replayed(activated=[4.0, 4.5], loads=[80.0, 60.0], batches=80)

    made = await plan(partial(solver, saying(*answers)))

    assert (made.worthwhile, made.gain) == (True, 0.25)
    assert (made.before, made.after) == (4.0, 4.5)


async def test_the_solver_is_told_how_workers_choose_and_what_rows_cost_them() -> None:
    # In every batch expert 4 has twelve rows, 5 and 6 have six each, and one worker has all of them.
    batch = np.array([[4, 5]] * 6 + [[4, 6]] * 6)
    feed = Feed(LayerTraffic.of_batches([batch] * 40, NUM_EXPERTS))
    workers = [msgspec.structs.replace(worker, ridge_rows=1) for worker in CURRENT.workers]
    current = msgspec.structs.replace(CURRENT, workers=workers)

    async def before(scheduling: str) -> Any:
        assert feed.traffic is not None
        feed.traffic.scheduling = scheduling
        planner = Planner(feed, partial(solver, limit_s=60.0))
        return await planner.plan(current, RECORDS, "eplb", [], None)

    by_rows, by_experts = await before("aebs"), await before("aebs-memory-bound")

    assert by_rows.gain == 0.5  # 24 rows on one worker: the 12 of expert 4 alone are the least
    assert by_experts.gain == pytest.approx(2 / 3)
    assert (await before("of a newer worker")).gain == by_experts.gain


async def test_bytes_are_those_of_the_workers_that_are_placed() -> None:
    stranger = msgspec.structs.replace(
        RECORDS[0], worker_id="x", model_digest="other", expert_bytes=10**9
    )

    planner = Planner(Feed(), partial(solver, limit_s=60.0))
    made = await planner.plan(CURRENT, [*RECORDS, stranger], "eplb", [], None)

    assert made.moved_bytes == 100 * len(made.moves) > 0


async def test_a_worker_that_was_started_again_must_be_placed_first() -> None:
    again = msgspec.structs.replace(RECORDS[1], generation=2)

    made = await Planner(Feed(), None).plan(  # type: ignore[arg-type]
        CURRENT, [RECORDS[0], again, RECORDS[2]], "eplb", [], None
    )

    assert (made.worthwhile, made.reason) == (False, "w1 left")


async def test_many_large_layers_are_replayed_as_far_as_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solving_process, "REPLAY_S", 0.05)
    num_experts, num_instances = 160, 16
    rng = np.random.default_rng(0)
    batches = [np.argsort(rng.random((32, num_experts)), axis=1)[:, :8] for _ in range(64)]
    traffic = [SentTraffic.of(LayerTraffic.of_batches(batches, num_experts))] * 4
    held = uniform(num_experts, 4, [12] * num_instances)

    found = solving_process.answer(Replay(placements=[held] * 3, traffic=traffic))

    assert isinstance(found, Replayed)
    assert 0 < found.batches < 4 * 32  # there are half of 64 for each layer
    assert len(found.loads) == 3
