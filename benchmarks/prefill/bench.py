"""The whole system for prompts that are only read, against synchronous expert parallelism.

Five sides answer the same prompts in turn, round by round, on processes that all run at the same
time:

- ``whole_system``: experts gathered layer by layer, prefix router;
- the same without the router;
- all-to-all with a prefix router;
- ``all_to_all_round_robin``, the baseline;
- all experts resident.

``mixed`` is a real workload in which prompts share prefixes, ``unshared`` one without shared
prefixes. Workers are on hosts made of network namespaces, whose links have a rate. Unless quick,
they are also on this machine, with shared memory between them.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.links import LinkedHosts, NoLinks, linked_hosts
from benchmarks.common.prompt_clients import Answered, ask_all
from benchmarks.common.suite import DEMO
from benchmarks.common.turns import DRIFT, SteadyTurns, in_turn, ratios, spread
from benchmarks.prefill import gathered
from benchmarks.prefill.fleet import AttentionFleet, running_fleets
from benchmarks.router.workload import Mix, Workload
from moesaic.cluster.rpc.channels import channel
from moesaic.models.configuration.config import load_config
from moesaic.v1.gateway_pb2 import SetPolicyRequest
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub

WORKERS = 2
CLIENTS = 32
LINK_MBIT = 500
MAX_ROWS = 4096  # in one step
KV_BLOCKS = 3072  # of each worker
MOST_REPEATED = 2
FULL, QUICK = Mix(examples=32, documents=16, single=16), Mix(12, 6, 6)
SIDES = {  # dispatch, router's policy; ours and the baseline one after the other
    "whole_system": ("gathered", "prefix-flops"),
    "all_to_all_round_robin": ("all-to-all", "round-robin"),
    "gathered_round_robin": ("gathered", "round-robin"),
    "all_to_all_prefix_only": ("all-to-all", "prefix-only"),
    "resident": ("local", "prefix-flops"),
}
OURS = "whole_system"
QUICK_SIDES = (OURS, "all_to_all_round_robin")
FLAGS = ("--max-num-batched-tokens", str(MAX_ROWS), "--kv-blocks", str(KV_BLOCKS))
# The demo model's last layer has one row a prompt, too few to fetch experts for.
STREAMED_LAYERS = load_config(DEMO).num_layers - 1
ROWS = (64, 512, 1900)  # of steps whose waits are looked at
MEMORY_MODES = ("offload", "gathered", "gathered+offload")


def run(quick: bool) -> dict[str, Any]:
    """Measure throughput, exposed transfers and memory."""
    workload, load = Workload(), os.getloadavg()[0]
    figures: dict[str, Any] = {}
    notes = [
        "gateways, workers and clients share this machine's cores, one computing thread a worker; the demo model in "
        "float32; one token is answered to each prompt; every run has a cache salt of its own",
        f"rounds within which a fixed product's rate changed by more than {DRIFT:.0%} were repeated, at most "
        f"{MOST_REPEATED} of them; load_average: this machine's, of the last minute, at start and end",
        "ours_is_times: whole_system's tokens per second over those of the side, in the same round; the baseline is "
        "all_to_all_round_robin",
        "exposed_transfer_ms: what the layers of one step waited for their experts, by the rows of the step; "
        "hiding_rows: F* in rows, as the workers measured it at their start",
        "memory: of the experts of one process that has nothing else, benchmarks/prefill/gathered.py; not fitted",
    ]
    try:
        with linked_hosts([f"host-{idx}" for idx in range(WORKERS)], LINK_MBIT) as hosts:
            figures[f"links_of_{LINK_MBIT}_mbit"] = _on(hosts, workload, quick)
    except NoLinks as error:
        notes.append(f"no hosts with links of their own: {error}")
    if not quick or not figures:
        figures["shared_memory"] = _on(None, workload, quick)
    figures["memory"] = _memory(MEMORY_MODES[:1] if quick else MEMORY_MODES)
    if quick:
        notes.append("quick: fewer prompts, sides and modes, one round, the same code path")
    return {
        "config": {
            "attention_workers": WORKERS,
            "clients": CLIENTS,
            "max_num_batched_tokens": MAX_ROWS,
            "kv_blocks": KV_BLOCKS,
            "mixed": vars(QUICK if quick else FULL),
            "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        },
        "figures": figures,
        "paper": {
            "whole_system": "1.35-1.37 times the best baseline, 8 GPUs, real workload (MoE-Prefill fig. 8)",
            "without_shared_prefixes": "1.30-1.59 times (MoE-Prefill section 8.3)",
        },
        "notes": notes,
    }


def _on(hosts: LinkedHosts | None, workload: Workload, quick: bool) -> dict[str, Any]:
    sides = QUICK_SIDES if quick else tuple(SIDES)
    turns = SteadyTurns(0 if quick else MOST_REPEATED)
    kinds = dict.fromkeys([SIDES[side][0] for side in sides], FLAGS)
    with running_fleets(kinds, WORKERS, hosts) as fleets:
        measured = asyncio.run(_measure(fleets, workload, sides, turns, quick))
        calibrated = [worker.logged("gather.calibrated") for worker in fleets["gathered"].workers]
    facts = ("hiding_rows", "slowdown", "saturation_flops", "compute_ms", "transfer_ms")
    return {
        **{name: runs.figures() for name, runs in measured.runs.items()},
        "exposed_transfer_ms": measured.exposed,
        "calibrated": {fact: [worker[fact] for worker in calibrated] for fact in facts},
        "gemm_gflops": spread(turns.gemm_gflops),
        "rounds_repeated": turns.num_repeated,
    }


@dataclass
class _Runs:
    """One workload's rounds, by side."""

    answered: dict[str, list[Answered]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        ours = [run.tokens_per_s for run in self.answered[OURS]]
        return {
            side: {
                "tokens_per_s": spread([run.tokens_per_s for run in runs]),
                "cached_share": round(statistics.median(r.cached / r.tokens for r in runs), 3),
                "ours_is_times": spread(ratios(ours, [run.tokens_per_s for run in runs])),
            }
            for side, runs in self.answered.items()
        }


@dataclass
class _Measured:
    runs: dict[str, _Runs] = field(default_factory=dict)
    exposed: dict[str, Any] = field(default_factory=dict)


async def _measure(
    fleets: Mapping[str, AttentionFleet],
    workload: Workload,
    sides: Sequence[str],
    turns: SteadyTurns,
    quick: bool,
) -> _Measured:
    measured = _Measured()
    mix, rounds = (QUICK, 1) if quick else (FULL, 5)
    count = sum(vars(mix).values())
    for side in sides:
        await _answer(fleets, side, workload.prompts(QUICK, seed=0), f"warm-up {side}")
    for number in range(rounds):
        prompts = {
            "mixed": workload.prompts(mix, seed=number + 1),
            "unshared": workload.unshared(count, seed=number + 1),
        }
        for name, asked in prompts.items():

            async def turn(
                attempt: int,
                salt: str = f"{name} {number}",
                order: Sequence[str] = in_turn(sides, number),
                asked: Sequence[list[int]] = asked,
            ) -> dict[str, Answered]:
                salts = {side: f"{salt} {attempt} {side}" for side in order}
                return {side: await _answer(fleets, side, asked, salts[side]) for side in order}

            runs = measured.runs.setdefault(name, _Runs())
            for side, answered in (await turns.take(turn)).items():
                runs.answered.setdefault(side, []).append(answered)
    measured.exposed = await _exposed(fleets, workload, 4 if quick else 8)
    return measured


async def _answer(
    fleets: Mapping[str, AttentionFleet],
    side: str,
    prompts: Sequence[list[int]],
    salt: str,
    clients: int = CLIENTS,
) -> Answered:
    dispatch, policy = SIDES[side]
    fleet = fleets[dispatch]
    async with channel(fleet.admin_address) as connection:
        await GatewayServiceStub(connection).SetPolicy(SetPolicyRequest(policy=policy), timeout=10)
    return await ask_all(fleet.port, prompts, salt, clients)


async def _exposed(
    fleets: Mapping[str, AttentionFleet], workload: Workload, steps_each: int
) -> dict[str, Any]:
    """Time that layers waited for experts: steps of one prompt, and steps of many callers' prompts."""
    loads = {f"{rows}_rows": (workload.cut(rows, steps_each), 1) for rows in ROWS}
    loads["many_callers"] = (workload.unshared(8 * steps_each, seed=100), CLIENTS)
    exposed = {}
    for name, (prompts, clients) in loads.items():
        before = _sums(fleets["gathered"])
        answered = await _answer(fleets, OURS, prompts, f"exposed {name}", clients)
        now = _sums(fleets["gathered"])
        spent = {metric: now[metric] - before.get(metric, 0.0) for metric in now}
        steps = spent["moesaic_gather_layers_total"] / STREAMED_LAYERS
        exposed[name] = {
            "steps": round(steps),
            "rows_a_step": round((answered.tokens - answered.cached) / steps),
            "ms_a_step": round(spent["moesaic_gather_wait_seconds_total"] / steps * 1e3, 2),
        }
    return exposed


def _sums(fleet: AttentionFleet) -> dict[str, float]:
    sums: dict[str, float] = {}
    for worker in fleet.workers:
        for name, value in worker.metrics().items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _memory(modes: Sequence[str]) -> dict[str, Any]:
    """Measure the peak memory of experts against the plan, in a model of twelve layers."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        gathered.make_model(Path(name))
        for mode in modes:
            [worker] = gathered.run_mode(Path(name), mode, rows=(16,))
            peak, planned = worker["results"][0]["memory_bytes"], worker["planned_bytes"]
            found[mode] = {
                "peak_mb": round(peak / 1e6, 1),
                "planned_mb": round(planned / 1e6, 1),
                "peak_of_plan": round(peak / planned, 3),
                "plan_of_resident": round(planned / worker["resident_bytes"], 3),
            }
    return found
