"""A round: a new suite, and loads of rising rates on it. Each is predicted with the costs of those before it."""

import asyncio
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common.suite import RunningSuite
from benchmarks.simulate.load import SimulateClient, TimedAnswer
from benchmarks.simulate.watching import scheduler_predictor
from moesaic.messages.scaling import ScalingPolicy
from moesaic.scaling.contract import RecentDemand, ServingLimits, StepTimes
from moesaic.services.scheduler.scaling.predictor import FleetPredictor
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic_lab.simulation.trace_files import read_arrivals

AZURE = Path(__file__).parents[1] / "data/azure2023_conv.csv.gz"
SHORTER = 10, 5  # times, prompts and answers: the demo model's context is short
MOST_PROMPT, MOST_ANSWER = 768, 128  # tokens
LEAD_S = 8.0  # of each load, that is not counted: it begins with an idle suite
WITHIN_S, LOOK_S = 30.0, 0.2  # a new suite tells its first costs
SECONDS = re.compile(
    r"^(moesaic_step_seconds|moesaic_layer_exchange_seconds)_sum(?:{.*})? (\S+)", re.M
)


@dataclass(frozen=True)
class ServedLoad:
    """One load, and what the scheduler knew of it.

    Attributes:
        times: times of steps, from the costs that workers had reported before the load.
        later_times: from those after it.
        limits: limits of the attention worker.
        demand: demand of the counted part, as workers reported it.
        answers: to the requests of that part, as the client saw them.
        attention_busy: part of the time in which the attention worker computed.
        ended_s: end of the counted part, in seconds from the start of the load.
    """

    times: StepTimes
    later_times: StepTimes
    limits: ServingLimits
    demand: RecentDemand
    answers: list[TimedAnswer]
    attention_busy: float
    ended_s: float


def lengths() -> ArrivalTrace:
    """Read lengths of real requests, shortened."""
    trace = read_arrivals(AZURE)
    prompts = -(-trace.prompt_tokens // SHORTER[0])
    answers = np.maximum(trace.answer_tokens // SHORTER[1], 2)
    return replace(trace, prompt_tokens=prompts, answer_tokens=answers).at_most(
        MOST_PROMPT, MOST_ANSWER
    )


async def measure_capacity(suite: RunningSuite, burst: int) -> float:
    """Measure requests per second with this number at once."""
    client = SimulateClient(suite.port, seed=0)
    await client.open(burst)
    await client.together(_first(burst // 2))
    answers = await client.together(_first(burst))
    client.close()
    return burst / max(each.ended_s for each in answers)


async def serve_round(
    suite: RunningSuite, number: int, rates: Mapping[str, float], span_s: float
) -> dict[str, ServedLoad]:
    """Serve loads on a suite that has served nothing yet.

    Args:
        suite: suite that runs.
        number: number of the round, the seed of prompts and arrivals.
        rates: requests a second of each load, rising.
        span_s: seconds of each load that are counted.
    """
    client = SimulateClient(suite.port, seed=1 + number)
    async with scheduler_predictor(suite) as predictor:
        await client.serve(_trace(min(rates.values()), LEAD_S, 100 * number))
        await _known(predictor)
        found = {}
        for at, (name, rate) in enumerate(rates.items(), 1):
            trace = _trace(rate, LEAD_S + span_s, 100 * number + at)
            found[name] = await _serve(suite, client, predictor, trace, span_s)
    client.close()
    return found


async def _serve(
    suite: RunningSuite,
    client: SimulateClient,
    predictor: FleetPredictor,
    trace: ArrivalTrace,
    span_s: float,
) -> ServedLoad:
    times = await _known(predictor)
    serving = asyncio.create_task(client.serve(trace))
    await asyncio.sleep(LEAD_S)
    before_s = await asyncio.to_thread(computed_s, suite)
    await asyncio.sleep(span_s)
    after_s = await asyncio.to_thread(computed_s, suite)
    demand = predictor.demand(ScalingPolicy(window_s=span_s))
    later_times = await _known(predictor)
    answers = [each for each in await serving if each.due_s >= LEAD_S]
    busy = (after_s - before_s) / span_s
    limits, ended_s = predictor.limits(), LEAD_S + span_s
    return ServedLoad(times, later_times, limits, demand, answers, busy, ended_s)


async def _known(predictor: FleetPredictor) -> StepTimes:
    """Return the times of steps, which become known with the first reports of workers.

    Raises:
        TimeoutError: they are not known after a while.
    """
    for _ in range(round(WITHIN_S / LOOK_S)):
        if (times := predictor.times()) is not None:
            return times
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"workers told no costs within {WITHIN_S:g} s")


def computed_s(suite: RunningSuite) -> float:
    """Read the seconds of all steps of the attention worker so far, without those that it waited for experts."""
    address = suite.processes["attention-0"]["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        found = {name: float(sum_s) for name, sum_s in SECONDS.findall(page.read().decode())}
    return found["moesaic_step_seconds"] - found.get("moesaic_layer_exchange_seconds", 0.0)


def _trace(rate: float, span_s: float, seed: int) -> ArrivalTrace:
    return RateCurve.constant(rate, span_s).arrivals(lengths(), seed)


def _first(number: int) -> Sequence[tuple[int, int]]:
    trace = lengths()
    return list(
        zip(
            trace.prompt_tokens[:number].tolist(),
            trace.answer_tokens[:number].tolist(),
            strict=True,
        )
    )
