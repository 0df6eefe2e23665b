import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moesaic.costs import RandomChoice
from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey
from moesaic.engine.simulated import BatcherPlanner
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.messages.scaling import FleetShape
from moesaic.prefix.block_hashes import BLOCK_SIZE, BlockHasher
from moesaic.simulation.arrivals import ArrivalTrace
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.fleet import SimulatedFleet
from moesaic.simulation.planning import SimulatedRequest
from moesaic.simulation.step_clock import MeasuredSteps, StepClock
from tests.engine.steps.steps import MANY_PLACES, advance
from tests.simulation.fleets import MODEL, drawn_trace, fleet_of

FEW_PLACES = replace(MANY_PLACES, max_num_seqs=7, max_num_batched_tokens=64)


def fleet_of_batchers(trace: ArrivalTrace, make_batcher: Callable[[], Batcher]) -> SimulatedFleet:
    clock = StepClock(MeasuredSteps(MODEL, RandomChoice(32, 4)), FleetShape(1, 1))
    return SimulatedFleet(EventLoop(), trace, lambda: BatcherPlanner(make_batcher()), clock)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [40, 1000])
def test_the_planner_plans_what_the_batcher_plans(seed: int, num_blocks: int) -> None:
    random = np.random.default_rng(seed)
    batchers = [Batcher(FEW_PLACES, num_blocks, step_target_s=0.02) for _ in range(2)]
    planner, alone = BatcherPlanner(batchers[0]), batchers[1]
    for number in range(40):
        prompt, answer = map(int, random.integers(1, 200, 2))
        planner.submit(SimulatedRequest(number, prompt, answer))
        task = GenerationTask(max_tokens=answer)
        alone.submit(Request(RequestKey(str(number)), (0,) * prompt, task))

    num_ended = 0
    while (rows := planner.next_step()) is not None:
        planned = alone.next_step()
        assert isinstance(planned, PlannedStep)
        assert rows.prompt_rows == planned.prompt_rows
        assert rows.prompt_rows + rows.answer_rows == sum(len(c.token_ids) for c in planned.chunks)
        assert rows.keys + rows.prompt_keys == sum(
            c.start + i + 1 for c in planned.chunks for i in range(len(c.token_ids))
        )
        seconds = 0.005 + 1e-4 * (rows.prompt_rows + rows.answer_rows)
        outcome = planner.took(1, seconds)
        ended = advance(alone, planned)
        alone.took(planned, seconds)
        assert [str(request.number) for request in outcome.ended] == [k.request_id for k in ended]
        num_ended += len(ended)

    assert num_ended == 40
    assert planner.num_open == 0
    assert not alone.unfinished()


def test_a_fleet_of_batchers_serves_every_request() -> None:
    trace = drawn_trace(per_s=12.0)
    fleet = fleet_of_batchers(trace, lambda: Batcher(FEW_PLACES, 60, step_target_s=0.05))

    fleet.loop.run()

    assert fleet.figures().ended == len(trace)
    assert sum(w.num_tokens for w in fleet.workers) == trace.answer_tokens.sum()
    planner = fleet.workers[0].planner
    assert isinstance(planner, BatcherPlanner)
    assert planner.batcher.tally.take().preemptions > 0


def test_plain_batching_serves_alike_where_nothing_is_scarce() -> None:
    trace = drawn_trace(per_s=6.0)
    trace = replace(trace, cached_tokens=np.zeros(len(trace), np.int64))
    batchers, plain = fleet_of_batchers(trace, lambda: Batcher(MANY_PLACES, 5000)), fleet_of(trace)

    batchers.loop.run()
    plain.loop.run()

    assert batchers.records.began_s == pytest.approx(plain.records.began_s)
    assert batchers.records.ended_s == pytest.approx(plain.records.ended_s)


def test_prompts_that_begin_alike_are_found_in_the_cache() -> None:
    batcher = Batcher(MANY_PLACES, 1000, BlockHasher(b"secret", "model", BLOCK_SIZE))
    planner = BatcherPlanner(batcher, lambda r: tuple(range(100)) + (r.number,) * 20)
    rows = []

    for number in range(2):
        planner.submit(SimulatedRequest(number, 120, 1))
        planned = planner.next_step()
        assert planned is not None
        rows.append(planned.prompt_rows)
        planner.took(1, 0.01)

    assert rows == [120, 120 - 96]  # whole blocks of 16


def test_nothing_here_needs_torch() -> None:
    code = "import sys, moesaic.engine.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
