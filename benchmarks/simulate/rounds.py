"""Rounds of loads on a running suite: those that costs are fitted to, and those that are predicted, in turns."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common.suite import RunningSuite
from benchmarks.simulate.load import SimulateClient, TimedAnswer
from benchmarks.simulate.reported import reported_steps
from moesaic.cli.machine.facts import gemm_gflops
from moesaic.messages.performance import FitSums
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.trace_files import read_arrivals

AZURE = Path(__file__).parents[1] / "data/azure2023_conv.csv.gz"
MOST_PROMPT, MOST_ANSWER = 768, 128  # tokens
DRIFT = 0.1  # of the machine's speed within a round, above which it counts for nothing


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


LONG_PROMPTS, LONG_ANSWERS, MIXED = LengthMix(5, 12), LengthMix(20, 3), LengthMix(10, 5)
FITTED = (
    PlannedLoad(0.6, LONG_PROMPTS),
    PlannedLoad(0.4, LONG_ANSWERS),
    PlannedLoad(0.2, LONG_PROMPTS),
)
PREDICTED = {
    "low": PlannedLoad(0.3, MIXED),
    "middle": PlannedLoad(0.5, MIXED),
    "high": PlannedLoad(0.7, MIXED),
}


@dataclass(frozen=True)
class LoadRound:
    """One round.

    Attributes:
        fitted: answers of the loads that costs are fitted to.
        predicted: answers of the others, by name.
        reported: costs of steps, as the worker told them during the loads that costs are fitted to.
        drift: of the machine's speed, from probe to probe.
    """

    fitted: list[list[TimedAnswer]]
    predicted: dict[str, list[TimedAnswer]]
    reported: list[FitSums]
    drift: float


@dataclass(frozen=True)
class LoadRounds:
    """Serves rounds on one suite.

    Attributes:
        suite: that runs.
        client: of the suite.
        requests: of each load, on average.
    """

    suite: RunningSuite
    client: SimulateClient
    requests: int

    async def warm_up(self) -> None:
        """Have some requests of all lengths answered."""
        for mix in (LONG_PROMPTS, LONG_ANSWERS):
            await self.client.together(_first(mix, 16))

    async def capacity(self, requests: int) -> dict[LengthMix, float]:
        """Measure requests a second of each mix when so many are there at once."""
        found = {}
        for mix in (LONG_PROMPTS, LONG_ANSWERS, MIXED):
            answers = await self.client.together(_first(mix, requests))
            found[mix] = requests / max(each.ended_s for each in answers)
        return found

    async def round(self, number: int, capacity: dict[LengthMix, float]) -> LoadRound:
        """Serve each load once, fitted and predicted ones in turns."""
        probes = [gemm_gflops()]
        fitted, predicted = list[list[TimedAnswer]](), dict[str, list[TimedAnswer]]()
        reported: list[FitSums] = []
        for at, (fit, (name, load)) in enumerate(zip(FITTED, PREDICTED.items(), strict=True)):
            begun_s = time.time()
            fitted.append(await self._serve(fit, 100 * number + 2 * at, capacity))
            reported += await reported_steps(self.suite, begun_s)
            predicted[name] = await self._serve(load, 100 * number + 2 * at + 1, capacity)
            probes.append(gemm_gflops())
        return LoadRound(fitted, predicted, reported, 1 - min(probes) / max(probes))

    async def _serve(
        self, load: PlannedLoad, seed: int, capacity: dict[LengthMix, float]
    ) -> list[TimedAnswer]:
        per_s = load.share * capacity[load.mix]
        curve = RateCurve.constant(per_s, self.requests / per_s)
        return await self.client.serve(curve.arrivals(load.mix.lengths(), seed))


def serve_rounds(
    suite: RunningSuite, requests: int, burst: int, rounds: int, most_rounds: int
) -> tuple[dict[LengthMix, float], list[LoadRound]]:
    """Serve so many rounds, and more in place of those in which the machine's speed changed, up to ``most_rounds``.

    Returns:
        Capacities, and all rounds.
    """

    async def served() -> tuple[dict[LengthMix, float], list[LoadRound]]:
        client = SimulateClient(suite.port, seed=1)
        await client.open(burst)
        loads = LoadRounds(suite, client, requests)
        await loads.warm_up()
        capacity = await loads.capacity(burst)
        found: list[LoadRound] = []
        while len(found) < most_rounds and sum(map(is_steady, found)) < rounds:
            found.append(await loads.round(len(found), capacity))
        client.close()
        return capacity, found

    return asyncio.run(served())


def is_steady(served: LoadRound) -> bool:
    """Tell if the machine's speed stayed about the same."""
    return served.drift <= DRIFT


def _first(mix: LengthMix, number: int) -> Sequence[tuple[int, int]]:
    lengths = mix.lengths()
    return list(
        zip(
            lengths.prompt_tokens[:number].tolist(),
            lengths.answer_tokens[:number].tolist(),
            strict=True,
        )
    )
