"""The simulator beside a real suite at loads that it was not fitted on, and its own speed.

A suite of the demo model, its experts made wider so that steps are not over in a millisecond, is asked over REST:
Poisson arrivals, lengths of a real conversation service, made shorter. In each round a new suite reports what its
steps cost during three loads, and then serves three others of other rates and lengths. These are simulated: the same
requests at the same times, by the engine's own batcher with the suite's limits. Rounds are short and several, for
the machine's pace changes. Errors are of means and 90th percentiles.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.wide_experts import widen_experts
from benchmarks.simulate.replay import (
    BatcherMaker,
    CalibratedSuite,
    calibrated,
    latencies,
    measured,
    relative_errors,
    trace_of,
)
from benchmarks.simulate.rounds import (
    AZURE,
    FITTED,
    NEAR_CAPACITY,
    PREDICTED,
    Capacity,
    LoadRound,
    measure_capacity,
    serve_round,
)
from benchmarks.simulate.speed import LIMITS, plain, speed, step_by_step
from moesaic.cluster.rpc.channels import channel
from moesaic.engine.simulated import BatcherPlanner
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.limits import EngineLimits
from moesaic.messages.performance import PART_TERMS
from moesaic.prefix.block_hashes import BLOCK_SIZE
from moesaic.simulation.arrivals import ArrivalTrace
from moesaic.simulation.trace_files import read_arrivals
from moesaic.v1 import attention_pb2, attention_pb2_grpc

TOPOLOGIES = ("local", "disaggregated")
WIDER = 16
TARGET = 0.15
ROUNDS, SPAN_S, BURST = 3, 20.0, 32
QUICK_SPAN_S, QUICK_BURST, QUICK_WIDER = 2.5, 12, 1
SLOWER = 1.05
LARGEST = 4096
NOTES = (
    f"relative_error: how much more the simulator says than was measured, as a part of it; target {TARGET}, but for "
    f"the load {NEAR_CAPACITY}. Over all requests of a load in all rounds; by_round: of each round on its own",
    "measured_by_round: arrivals and lengths of a load are the same in each round, so this tells how alike the real "
    "suite is to itself",
    f"if_slower: how much larger simulated figures are when steps take {SLOWER - 1:.0%} longer. Near a worker's "
    "capacity waiting grows many times as much, so an error of the costs does too",
    "costs: as workers reported them (LoadReport) after the loads that they are fitted to, of all rounds, none of "
    "which is predicted; the delay of first tokens (entry_ms) is what short requests took beyond them, one by one",
    "event: an arrival, the end of a step of one worker, or a token that is delivered; action: what the loop takes "
    "from its heap, of which a run of alike steps is one",
    "events_per_s: of one core's time; 64 workers, steps of about 25 ms, requests as long as the trace's",
    "batcher: the same by the engine's own batcher, which the validation uses",
    "each worker has one thread; the load generator and the gateway share the machine with them",
    "lengths: requests of Azure's conversation trace of 2023, shortened; arrivals: Poisson; probe_ms: a fixed piece of "
    "work meanwhile, by load: a sum over 16 MiB",
)


def run(quick: bool) -> dict[str, Any]:
    """Validate both topologies, then measure speed; ``quick`` has one short round of one."""
    rounds, span_s, burst = (1, QUICK_SPAN_S, QUICK_BURST) if quick else (ROUNDS, SPAN_S, BURST)
    wider = QUICK_WIDER if quick else WIDER
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / DEMO.name
        model.mkdir()
        widen_experts(DEMO, model, wider)
        for topology in TOPOLOGIES[1:] if quick else TOPOLOGIES:
            capacity, served, batchers = _serve(model, topology, rounds, span_s, burst)
            for name, found in validation(served, batchers).items():
                figures.setdefault(name, {})[topology] = found
            figures.setdefault("suites", {})[topology] = {
                "capacity_per_s": [round(each, 2) for each in capacity.values()],
                "probe_ms": [[round(ms, 3) for ms in each.probe_ms] for each in served],
            }
    errors = [
        abs(error)
        for loads in figures["relative_error"].values()
        for name, found in loads.items()
        if name != NEAR_CAPACITY
        for error in found.values()
    ]
    figures["largest_relative_error"] = max(errors)
    figures["within_target"] = sum(error <= TARGET for error in errors) / len(errors)
    figures |= speeds(quick)
    return {
        "config": {
            "model": DEMO.name,
            "wider": wider,
            "rounds": rounds,
            "seconds_of_a_load": span_s,
            "burst": burst,
            "fitted": [msgspec.to_builtins(load) for load in FITTED],
            "predicted": {name: msgspec.to_builtins(load) for name, load in PREDICTED.items()},
        },
        "figures": figures,
        "notes": [
            *NOTES,
            *(
                [
                    "quick: one round of seconds of one topology with narrow experts, the same code path"
                ]
                if quick
                else []
            ),
        ],
    }


def _serve(
    model: Path, topology: str, rounds: int, span_s: float, burst: int
) -> tuple[Capacity, list[LoadRound], BatcherMaker]:
    """Serve rounds, each on a suite of its own: what it reports then comes of the loads to be fitted alone."""
    flags = "--model", str(model), "--topology", topology
    with running_suite(*flags, MOESAIC_THREADS="1") as suite:
        batchers = BatcherMaker(model, asyncio.run(_kv_blocks(suite)))
        capacity = asyncio.run(measure_capacity(suite, burst))
    served = list[LoadRound]()
    for number in range(rounds):
        with running_suite(*flags, MOESAIC_THREADS="1") as suite:
            served.append(asyncio.run(serve_round(suite, number, capacity, span_s)))
    return capacity, served, batchers


def validation(rounds: Sequence[LoadRound], batchers: BatcherMaker) -> dict[str, Any]:
    """Fit costs to all rounds, simulate their other loads, and compare all requests of each load."""
    suite = calibrated(
        [answer for each in rounds for answer in each.alone],
        [sums for each in rounds for sums in each.reported],
        batchers,
    )
    found: dict[str, Any] = {
        name: {} for name in ("relative_error", "by_round", "if_slower", "latencies")
    }
    for name in PREDICTED:
        loads = [each.predicted[name] for each in rounds]
        traces = [trace_of(load) for load in loads]
        real = measured([answer for load in loads for answer in load])
        simulated = _simulated(suite, traces)
        found["relative_error"][name] = relative_errors(simulated, real)
        found["by_round"][name] = [
            relative_errors(_simulated(suite, [trace]), measured(load))
            for trace, load in zip(traces, loads, strict=True)
        ]
        slower = _simulated(suite.slower(SLOWER), traces)
        found["if_slower"][name] = relative_errors(slower, simulated)
        found["latencies"][name] = {
            "requests": sum(map(len, loads)),
            "measured": _rounded(real),
            "measured_by_round": [_rounded(measured(load)) for load in loads],
            "simulated": _rounded(simulated),
        }
    found["costs"] = {
        "terms": PART_TERMS["step"],
        "step_us": [round(1e6 * each, 4) for each in suite.model.parts["step"].unit_s],
        "entry_ms": round(1e3 * suite.delays.entry_s, 2),
    }
    return found


def speeds(quick: bool) -> dict[str, Any]:
    """Measure the simulator itself."""
    lengths = read_arrivals(AZURE)
    seconds = 20.0 if quick else 200.0
    many = speed(64, seconds, lengths, plain)
    return {
        "events_per_s": many["events_per_s"],
        "speed": {
            "runs": many,
            "step_by_step": speed(64, seconds / 4, lengths, step_by_step),
            "batcher": speed(4, seconds / 4, lengths, _batcher),
        },
        "largest_fleet": speed(LARGEST, 1.0 if quick else 30.0, lengths, plain),
    }


def _batcher() -> BatcherPlanner:
    rows = LIMITS.max_num_batched_tokens
    limits = EngineLimits(LIMITS.max_num_seqs, rows, 1 << 20, 1 << 30, LIMITS.kv_tokens)
    return BatcherPlanner(Batcher(limits, LIMITS.kv_tokens // BLOCK_SIZE))


def _simulated(suite: CalibratedSuite, traces: Sequence[ArrivalTrace]) -> dict[str, float]:
    records = [suite.serve(trace) for trace in traces]
    ttft_s = np.concatenate([each.ttft_s for each in records])
    return latencies(ttft_s, np.concatenate([each.tpot_s for each in records]))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


async def _kv_blocks(suite: RunningSuite) -> int:
    async with channel(suite.attention_address, "attention-0") as to_worker:
        stub = attention_pb2_grpc.AttentionServiceStub(to_worker)
        return int((await stub.GetLoad(attention_pb2.GetLoadRequest())).kv_blocks_total)
