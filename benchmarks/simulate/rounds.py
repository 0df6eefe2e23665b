"""A round of loads on a suite of its own: first those that costs are fitted to, then those that are predicted.

A worker's costs are those of all its steps so far, later ones counting more. So none of the loads to be predicted may
come before, and it is asked after each load.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Self

import numpy as np

from benchmarks.common.suite import RunningSuite
from benchmarks.simulate.load import SimulateClient, TimedAnswer
from benchmarks.simulate.reported import reported_steps
from moesaic.messages.performance import FitSums
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.trace_files import read_arrivals

AZURE = Path(__file__).parents[1] / "data/azure2023_conv.csv.gz"
MOST_PROMPT, MOST_ANSWER = 768, 128  # tokens
SHORT, NUM_SHORT = (16, 4), 20  # tokens of prompt and answer; requests
PROBED, PROBE_EVERY_S = 1 << 22, 0.5  # numbers, that no cache of a core holds


@dataclass(frozen=True)
class LengthMix:
    """Lengths of real requests, so many times shorter: the demo model's context is short."""

    prompts: int
    answers: int

    def lengths(self) -> ArrivalTrace:
        """Read them."""
        trace = read_arrivals(AZURE)
        prompts, answers = (
            -(-trace.prompt_tokens // self.prompts),
            trace.answer_tokens // self.answers,
        )
        trace = replace(trace, prompt_tokens=prompts, answer_tokens=np.maximum(answers, 2))
        return trace.at_most(MOST_PROMPT, MOST_ANSWER)


@dataclass(frozen=True)
class PlannedLoad:
    """One load of a round; ``share`` of the capacity is its rate."""

    share: float
    mix: LengthMix


Capacity = dict[LengthMix, float]  # requests a second
LONG_PROMPTS, LONG_ANSWERS, MIXED = LengthMix(5, 12), LengthMix(20, 3), LengthMix(10, 5)
NEAR_CAPACITY = "near capacity"  # where errors of costs grow tenfold; no target is set there
FITTED = (
    PlannedLoad(0.2, LONG_PROMPTS),
    PlannedLoad(0.6, LONG_PROMPTS),
    PlannedLoad(0.8, LONG_ANSWERS),  # batches as large as the largest that is predicted
)
PREDICTED = {
    "low": PlannedLoad(0.2, MIXED),
    "middle": PlannedLoad(0.35, MIXED),
    "high": PlannedLoad(0.5, MIXED),
    NEAR_CAPACITY: PlannedLoad(0.65, MIXED),
}


@dataclass(frozen=True)
class LoadRound:
    """One round.

    Attributes:
        alone: answers to short prompts, of which each had the suite for itself.
        predicted: answers of the loads that are predicted, by name.
        reported: costs of steps, as the worker told them after each of the loads that costs are fitted to.
        probe_ms: mean of each load's probes, a fixed piece of work.
    """

    alone: list[TimedAnswer]
    predicted: dict[str, list[TimedAnswer]]
    reported: list[FitSums]
    probe_ms: list[float]


class MachineProbe:
    """A sum over a fixed array each half second, in seconds of its own thread: the machine's speed meanwhile."""

    def __init__(self) -> None:
        self._data, self._seconds = np.ones(PROBED, np.float32), list[float]()
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def take_ms(self) -> float:
        """Take the mean since the last call."""
        taken, self._seconds = self._seconds, []
        return 1e3 * float(np.mean(taken)) if taken else math.nan

    def _run(self) -> None:
        while not self._ended.wait(PROBE_EVERY_S):
            begun_s = time.thread_time()
            self._data.sum()
            self._seconds.append(time.thread_time() - begun_s)


@dataclass(frozen=True)
class LoadRunner:
    """Serves loads on one suite.

    Attributes:
        suite: that runs.
        client: of the suite.
        span_s: of each load.
    """

    suite: RunningSuite
    client: SimulateClient
    span_s: float

    async def warm_up(self) -> None:
        """Have some requests of all lengths answered."""
        for mix in (LONG_PROMPTS, LONG_ANSWERS):
            await self.client.together(_first(mix, 16))

    async def capacity(self, requests: int) -> Capacity:
        """Measure requests a second of each mix when so many are there at once."""
        found = {}
        for mix in (LONG_PROMPTS, LONG_ANSWERS, MIXED):
            answers = await self.client.together(_first(mix, requests))
            found[mix] = requests / max(each.ended_s for each in answers)
        return found

    async def round(self, capacity: Capacity) -> LoadRound:
        """Serve each load once."""
        probe_ms, served = list[float](), list[list[TimedAnswer]]()
        reported = list[FitSums]()
        alone = await self.client.one_by_one([SHORT] * NUM_SHORT)
        with MachineProbe() as probe:
            for at, load in enumerate((*FITTED, *PREDICTED.values())):
                served.append(await self._serve(load, at, capacity))
                probe_ms.append(probe.take_ms())
                if at < len(FITTED):
                    reported += await reported_steps(self.suite)
        predicted = dict(zip(PREDICTED, served[len(FITTED) :], strict=True))
        return LoadRound(alone, predicted, reported, probe_ms)

    async def _serve(self, load: PlannedLoad, seed: int, capacity: Capacity) -> list[TimedAnswer]:
        curve = RateCurve.constant(load.share * capacity[load.mix], self.span_s)
        return await self.client.serve(curve.arrivals(load.mix.lengths(), seed))


async def measure_capacity(suite: RunningSuite, burst: int) -> Capacity:
    """Measure what a suite can do, which is of no use for rounds afterwards; ``burst``: requests at once."""
    runner = LoadRunner(suite, SimulateClient(suite.port, seed=0), 0.0)
    await runner.client.open(burst)
    await runner.warm_up()
    capacity = await runner.capacity(burst)
    runner.client.close()
    return capacity


async def serve_round(
    suite: RunningSuite, number: int, capacity: Capacity, span_s: float
) -> LoadRound:
    """Serve a round on a suite that has served nothing yet.

    Args:
        suite: that runs.
        number: of the round; its prompts are drawn by it, while lengths and times are those of each round.
        capacity: that rates are parts of.
        span_s: of each load.
    """
    runner = LoadRunner(suite, SimulateClient(suite.port, seed=1 + number), span_s)
    await runner.warm_up()
    found = await runner.round(capacity)
    runner.client.close()
    return found


def _first(mix: LengthMix, number: int) -> Sequence[tuple[int, int]]:
    lengths = mix.lengths()
    return list(
        zip(
            lengths.prompt_tokens[:number].tolist(),
            lengths.answer_tokens[:number].tolist(),
            strict=True,
        )
    )
