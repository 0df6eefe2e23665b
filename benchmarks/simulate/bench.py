"""The model that scaling decides by, beside real suites: latencies of the same requests, predicted and measured.

A suite of the demo model is asked over REST; its experts are made wider, so that steps take longer
than a millisecond. Arrivals are Poisson; lengths are those of a real conversation service,
shortened. The benchmark reads the workers' reports as a scheduler does: demand, limits and costs.
Each load is predicted by ``moesaic.scaling.replay``, with the costs of earlier loads alone. Rates
are fractions of the capacity that a burst shows, up to all of it.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.suite import DEMO, running_suite
from benchmarks.common.wide_experts import widen_experts
from benchmarks.simulate.load import TimedAnswer
from benchmarks.simulate.rounds import LEAD_S, SHORTER, ServedLoad, measure_capacity, serve_round
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, StepTimes
from moesaic.scaling.replay import forecast
from moesaic_lab.simulation.arrivals import Floats

SHAPES = {"local": FleetShape(1, 0), "disaggregated": FleetShape(1, 2)}
WIDER, QUICK_WIDER = 8, 1
SHARES = {"low": 0.3, "middle": 0.5, "high": 0.7, "near capacity": 0.85}
ROUNDS, SPAN_S, BURST = 3, 24.0, 32
QUICK_SPAN_S, QUICK_BURST = 3.0, 12
CALM = 2.0  # targets: so many times what 90 of 100 requests of the first load took
NOTES = (
    "predicted: moesaic.scaling.replay, fed as the scheduler feeds it: arrivals of the load as workers reported them, "
    "limits, and costs that they had reported before the load began; measured: by the client, from when a request was "
    "sent; attention_busy by the worker's own counters",
    "relative_error: how much more was predicted than measured, as a part of it; of attainment and attention_busy the "
    "difference",
    "with_later_costs: errors of the same with the costs that workers had reported at the end of the load, so what "
    "remains is not the change of costs",
    "as a forecast ends with its window, so does the measurement: a request without a first token counts by its wait, "
    "and later tokens by those that it had",
    f"objectives: {CALM:g} times what 90 of 100 requests of the lowest load of the round took, for attainment alone",
    f"each load begins {LEAD_S:g} s before the part that is counted; near capacity and above, waits still grow then",
    f"lengths: requests of Azure's conversation trace of 2023, prompts {SHORTER[0]} and answers {SHORTER[1]} times "
    "shorter; the load generator and the gateway share the machine's cores with the workers, which have a thread each",
)
Figures = dict[str, float]


def run(quick: bool) -> dict[str, Any]:
    """Validate both topologies; ``quick`` has one short round of one."""
    rounds, span_s, burst = (1, QUICK_SPAN_S, QUICK_BURST) if quick else (ROUNDS, SPAN_S, BURST)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / DEMO.name
        model.mkdir()
        widen_experts(DEMO, model, QUICK_WIDER if quick else WIDER)
        for topology in list(SHAPES)[1:] if quick else SHAPES:
            found[topology] = _topology(model, topology, rounds, span_s, burst)
    return {
        "config": {
            "model": DEMO.name,
            "wider": QUICK_WIDER if quick else WIDER,
            "rounds": rounds,
            "counted_s": span_s,
            "burst": burst,
            "shares_of_capacity": SHARES,
        },
        "figures": found,
        "notes": [
            *NOTES,
            *(["quick: one round of seconds, narrow experts, the same code path"] if quick else []),
        ],
    }


def _topology(model: Path, topology: str, rounds: int, span_s: float, burst: int) -> dict[str, Any]:
    flags = "--model", str(model), "--topology", topology
    with running_suite(*flags, MOESAIC_THREADS="1") as suite:
        capacity = asyncio.run(measure_capacity(suite, burst))
    rates = {name: share * capacity for name, share in SHARES.items()}
    served = list[dict[str, ServedLoad]]()
    for number in range(rounds):
        with running_suite(*flags, MOESAIC_THREADS="1") as suite:
            served.append(asyncio.run(serve_round(suite, number, rates, span_s)))
    compared = [_compared(each, SHAPES[topology]) for each in served]
    return {
        "capacity_per_s": round(capacity, 2),
        "loads": {
            name: {
                "requests_per_s": round(rate, 2),
                "requests": sum(len(each[name].answers) for each in served),
                **_over_rounds([each[name] for each in compared]),
            }
            for name, rate in rates.items()
        },
    }


def _compared(loads: dict[str, ServedLoad], shape: FleetShape) -> dict[str, dict[str, Figures]]:
    """Predict the loads of a round, and set what was measured beside it."""
    objectives = objectives_of(next(iter(loads.values())))
    found = {}
    for name, load in loads.items():
        real = measured(load, objectives)
        found[name] = {
            "measured": real,
            "predicted": predicted(load, load.times, shape, objectives),
            "with_later_costs": predicted(load, load.later_times, shape, objectives),
        }
    return found


def _over_rounds(rounds: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Take the medians of rounds, of their figures and of their errors."""
    by_round = [errors(each["predicted"], each["measured"]) for each in rounds]
    later = [errors(each["with_later_costs"], each["measured"]) for each in rounds]
    return {
        "measured": _rounded(_medians([each["measured"] for each in rounds])),
        "predicted": _rounded(_medians([each["predicted"] for each in rounds])),
        "relative_error": _medians(by_round),
        "with_later_costs": _medians(later),
        "by_round": by_round,
        "measured_by_round": [_rounded(each["measured"]) for each in rounds],
    }


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {
        name: float(np.median([each[name] for each in rounds if name in each]))
        for name in rounds[0]
    }


def objectives_of(load: ServedLoad) -> Objectives:
    """Make targets that the answers of a load meet with room."""
    ttft_s, tpot_s = _latencies(load)
    return Objectives(CALM * _p90(ttft_s), CALM * _p90(tpot_s))


def measured(load: ServedLoad, objectives: Objectives) -> Figures:
    """Sum up what the client saw."""
    ttft_s, tpot_s = _latencies(load)
    met = (ttft_s <= objectives.ttft_s) & (tpot_s <= objectives.tpot_s)
    later_s = tpot_s[tpot_s > 0]
    attainment = float(met.mean()) if len(met) else 1.0
    return _figures(_p90(ttft_s), _p90(later_s), attainment, load.attention_busy)


def predicted(
    load: ServedLoad, times: StepTimes, shape: FleetShape, objectives: Objectives
) -> Figures:
    """Predict the load as a scheduler does."""
    found = forecast(load.demand, shape, times, load.limits, objectives)
    return _figures(found.ttft_p90_s, found.tpot_p90_s, found.attainment, found.attention_busy)


def errors(predictions: Figures, real: Figures) -> Figures:
    """Compare figures: relative errors of latencies, differences of parts; none of latencies without a token."""
    return {
        name: round(
            predictions[name] / value - 1 if name.endswith("_ms") else predictions[name] - value, 3
        )
        for name, value in real.items()
        if value or not name.endswith("_ms")
    }


def _figures(ttft_s: float, tpot_s: float, attainment: float, busy: float) -> Figures:
    return {
        "ttft_p90_ms": 1e3 * ttft_s,
        "tpot_p90_ms": 1e3 * tpot_s,
        "attainment": attainment,
        "attention_busy": busy,
    }


def _latencies(load: ServedLoad) -> tuple[Floats, Floats]:
    """Return times to first tokens, and of later ones, up to the end of the counted part."""
    ttft_s = [min(each.begun_s, load.ended_s) - each.sent_s for each in load.answers]
    tpot_s = [_later_token_s(each, load.ended_s) for each in load.answers]
    return np.array(ttft_s), np.array(tpot_s)


def _later_token_s(answer: TimedAnswer, ended_s: float) -> float:
    """Return the mean seconds of its later tokens until then; 0 without any."""
    had = [at_s for at_s in answer.token_s if at_s <= ended_s]
    return (had[-1] - had[0]) / (len(had) - 1) if len(had) > 1 else 0.0


def _p90(values: Floats) -> float:
    return float(np.percentile(values, 90, method="inverted_cdf")) if len(values) else 0.0


def _rounded(figures: Figures) -> Figures:
    return {name: round(value, 3) for name, value in figures.items()}
