"""The simulator beside a real suite at loads that it was not fitted on, and its own speed.

A suite of the demo model, its experts made wider so that steps are not over in a millisecond, is asked over REST:
Poisson arrivals, lengths of a real conversation service, made shorter. In each round three loads give the costs of a
step, and three others of other rates and lengths are then simulated: the same requests at the same times, by the
engine's own batcher with the suite's limits. Errors are of means and 90th percentiles, over all requests of a load.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.cpu_shares import cpu_shares
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
    PREDICTED,
    LoadRound,
    is_steady,
    serve_rounds,
)
from benchmarks.simulate.speed import LIMITS, plain, speed, step_by_step
from moesaic.cluster.rpc.channels import channel
from moesaic.engine.simulated import BatcherPlanner
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.limits import EngineLimits
from moesaic.prefix.block_hashes import BLOCK_SIZE
from moesaic.simulation.trace_files import read_arrivals
from moesaic.v1 import attention_pb2, attention_pb2_grpc

TOPOLOGIES = ("local", "disaggregated")
WIDER = 8
TARGET = 0.15
ROUNDS, MOST_ROUNDS, REQUESTS, BURST = 3, 3, 60, 32
CORES = 0.4  # of each worker
QUICK_REQUESTS, QUICK_BURST = 10, 12
LARGEST = 4096
NOTES = (
    "relative_error: how much more the simulator says than was measured, as a part of it; target 0.15 either way",
    "relative_error_of_reports: the same with the costs that the worker reports (LoadReport) in place of those fitted "
    "to what clients saw; where no report was due, these",
    "event: an arrival, the end of a step of one worker, or a token that is delivered; action: what the loop takes "
    "from its heap, of which a run of alike steps is one",
    "events_per_s: of one core's time; 64 workers, steps of about 25 ms, requests as long as the trace's",
    "batcher: the same by the engine's own batcher, which the validation uses",
    "each worker is held to a part of a core by the kernel, as if it had a device of its own, where that is possible "
    "(held_to_cores); the load generator and the gateway share the rest, which is part of what is fitted",
    "lengths: requests of Azure's conversation trace of 2023, shortened; arrivals: Poisson",
    f"rounds within which the machine's speed changed by more than 10 % are repeated, at most as often; steady_rounds "
    f"says how many were left, and none means that all count; target {TARGET:.0%}",
)


def run(quick: bool) -> dict[str, Any]:
    """Validate both topologies, then measure speed; ``quick`` has one short round of each."""
    rounds, most_rounds = (1, 1) if quick else (ROUNDS, MOST_ROUNDS)
    requests, burst = (QUICK_REQUESTS, QUICK_BURST) if quick else (REQUESTS, BURST)
    figures: dict[str, Any] = {
        name: {} for name in ("relative_error", "relative_error_of_reports", "latencies", "suites")
    }
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / DEMO.name
        model.mkdir()
        widen_experts(DEMO, model, WIDER)
        for topology in TOPOLOGIES:
            flags = "--model", str(model), "--topology", topology
            with running_suite(*flags, MOESAIC_THREADS="1") as suite, _held(suite) as is_held:
                batchers = BatcherMaker(model, asyncio.run(_kv_blocks(suite)))
                capacity, served = serve_rounds(suite, requests, burst, rounds, most_rounds)
            steady = [each for each in served if is_steady(each)]
            found = validation(steady or served, batchers)
            figures["relative_error"][topology] = found.pop("relative_error")
            figures["relative_error_of_reports"][topology] = found.pop("relative_error_of_reports")
            figures["latencies"][topology] = found.pop("latencies")
            figures["suites"][topology] = {
                "capacity_per_s": [round(each, 2) for each in capacity.values()],
                "held_to_cores": is_held,
                "rounds": len(served),
                "steady_rounds": len(steady),
                "drift": [round(each.drift, 3) for each in served],
                **found,
            }
    figures["largest_relative_error"] = max(
        abs(error)
        for loads in figures["relative_error"].values()
        for errors in loads.values()
        for error in errors.values()
    )
    figures |= speeds(quick)
    return {
        "config": {
            "model": DEMO.name,
            "wider": WIDER,
            "cores": CORES,
            "rounds": rounds,
            "requests_of_a_load": requests,
            "burst": burst,
            "fitted": [msgspec.to_builtins(load) for load in FITTED],
            "predicted": {name: msgspec.to_builtins(load) for name, load in PREDICTED.items()},
        },
        "figures": figures,
        "notes": [*NOTES, *(["quick: one round of seconds, the same code path"] if quick else [])],
    }


def _held(suite: RunningSuite) -> AbstractContextManager[bool]:
    """Hold the workers to their part of a core: what others do on the machine then changes little."""
    pids = [
        p["pid"] for name, p in suite.processes.items() if name.startswith(("attention", "expert"))
    ]
    return cpu_shares(pids, CORES)


def validation(rounds: Sequence[LoadRound], batchers: BatcherMaker) -> dict[str, Any]:
    """Fit costs in each round, simulate its other loads, and compare all requests of each load."""
    suites = [calibrated(each.fitted, batchers) for each in rounds]
    by_reports = [calibrated(each.fitted, batchers, each.reported) for each in rounds]
    errors, figures, of_reports = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name in PREDICTED:
        loads = [each.predicted[name] for each in rounds]
        real = measured([answer for load in loads for answer in load])
        simulated = _simulated(suites, [trace_of(load) for load in loads])
        errors[name] = relative_errors(simulated, real)
        told = _simulated(by_reports, [trace_of(load) for load in loads])
        of_reports[name] = relative_errors(told, real)
        figures[name] = {
            "requests": sum(map(len, loads)),
            "measured": _rounded(real),
            "simulated": _rounded(simulated),
        }
    return {
        "relative_error": errors,
        "latencies": figures,
        "relative_error_of_reports": of_reports,
        "step_us": [[round(1e6 * u, 4) for u in s.model.parts["step"].unit_s] for s in suites],
        "entry_ms": [round(1e3 * s.delays.entry_s, 2) for s in suites],
    }


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


def _simulated(suites: Sequence[CalibratedSuite], traces: Sequence[Any]) -> dict[str, float]:
    records = [suite.serve(trace) for suite, trace in zip(suites, traces, strict=True)]
    ttft_s = np.concatenate([each.ttft_s for each in records])
    return latencies(ttft_s, np.concatenate([each.tpot_s for each in records]))


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


async def _kv_blocks(suite: RunningSuite) -> int:
    async with channel(suite.attention_address, "attention-0") as to_worker:
        stub = attention_pb2_grpc.AttentionServiceStub(to_worker)
        return int((await stub.GetLoad(attention_pb2.GetLoadRequest())).kv_blocks_total)
