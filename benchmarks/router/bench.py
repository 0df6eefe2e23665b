"""Costs and gains of the prefix router: a decision, a prompt's names, and the throughput of a real suite by policy.

``decision_us``: time from a request's block names to its worker, 8,192 tokens. ``throughput``:
prompt tokens per second of a fixed number of clients, and the ratio of ours to each other policy in
the same round. The workload is mixed and prefill-only, on two and on four attention workers.
Policies take turns within each round, each with cold caches.
"""

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.prompt_clients import ask_all
from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.common.turns import DRIFT, SteadyTurns, in_turn, ratios, spread
from benchmarks.router import decisions as router_decisions
from benchmarks.router.workload import Mix, Workload
from moesaic.cluster.rpc.channels import channel
from moesaic.prefix.policies import POLICY_NAMES
from moesaic.v1.gateway_pb2 import SetPolicyRequest
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub
from moesaic_lab.routing.policies import BASELINES

OURS = "prefix-flops"
WORKERS = (2, 4)
CLIENTS_PER_WORKER = 12
KV_BLOCKS = 1024  # of each worker
FULL, QUICK = Mix(examples=48, documents=24, single=24), Mix(16, 8, 8)
TARGETS = {"decision_us": 60.0, "hash_tokens_per_s": 10e6}


def run(quick: bool) -> dict[str, Any]:
    """Measure decisions first, then the suite."""
    rounds, mix = (1, QUICK) if quick else (3, FULL)
    decisions, workload = router_decisions.measure(quick), Workload()
    measured = dict[int, _Measured]()
    for workers in WORKERS[:1] if quick else WORKERS:
        # As many requests of each worker, so that a prefix goes round as often.
        own = mix.times(workers // WORKERS[0])
        flags = ("--topology", "local", "--attention", str(workers))
        with running_suite(*flags, MOESAIC_KV_BLOCKS=str(KV_BLOCKS)) as suite:
            clients = CLIENTS_PER_WORKER * workers
            measuring = _measure(suite, workload, own, rounds, clients, repeat=not quick)
            measured[workers] = asyncio.run(measuring)
    return {
        "config": {
            "prompt_tokens": router_decisions.PROMPT_TOKENS,
            "attention_workers": list(measured),
            "kv_blocks": KV_BLOCKS,
            "clients_per_worker": CLIENTS_PER_WORKER,
            "requests_of_two_workers": vars(mix),
            "tokens_per_run": {workers: each.tokens for workers, each in measured.items()},
            "rounds": rounds,
            "rounds_repeated": sum(each.turns.num_repeated for each in measured.values()),
        },
        "figures": {
            **decisions,
            "throughput": {
                f"{workers}_workers": each.figures() for workers, each in measured.items()
            },
            "gemm_gflops": spread(
                [rate for each in measured.values() for rate in each.turns.gemm_gflops]
            ),
            "targets": TARGETS,
        },
        "paper": {"throughput_gain_of_the_router": "1.16-1.18 at 8 GPUs (MoE-Prefill fig. 10)"},
        "notes": [
            "decision_us: one core, no processes; 40 requests under way; median over five ways in which a prompt meets "
            "the index, and each of them",
            "throughput: gateway, workers and clients share this machine's cores; prompts of "
            "benchmarks/router/workload.py, one token each, token ids over REST; every run has a cache salt of its own",
            f"rounds within which a fixed product's rate changed by more than {DRIFT:.0%} were repeated, at most once "
            "each",
            "with two workers a prefix is computed twice at worst, with four four times; cached_share does not depend "
            "on the machine's speed",
            *(["quick: fewer requests, one round, the same code path"] if quick else []),
        ],
    }


@dataclass
class _Measured:
    turns: SteadyTurns
    rates: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0

    def figures(self) -> dict[str, Any]:
        ours = self.rates[OURS]
        return {
            policy: {
                "tokens_per_s": spread(rates),
                "cached_share": round(statistics.median(self.cached[policy]), 3),
                "ours_is_times": spread(ratios(ours, rates)),
            }
            for policy, rates in self.rates.items()
        }


async def _measure(
    suite: RunningSuite, workload: Workload, mix: Mix, rounds: int, clients: int, *, repeat: bool
) -> _Measured:
    measured = _Measured(SteadyTurns(rounds if repeat else 0))
    policies = [*POLICY_NAMES, *BASELINES]
    address = str(suite.processes["gateway"]["admin_address"])
    async with channel(address) as connection:
        stub = GatewayServiceStub(connection)

        async def run_policy(
            policy: str, salt: str, prompts: list[list[int]]
        ) -> tuple[float, float]:
            await stub.SetPolicy(SetPolicyRequest(policy=policy), timeout=10)
            answered = await ask_all(suite.port, prompts, salt, clients)
            return answered.tokens_per_s, answered.cached / answered.tokens

        await run_policy(OURS, "warm-up", workload.prompts(QUICK, seed=0))
        for number in range(rounds):
            prompts = workload.prompts(mix, seed=number + 1)
            measured.tokens = sum(map(len, prompts))
            order = in_turn(policies, number)

            async def turn(
                attempt: int,
                number: int = number,
                order: list[str] = order,
                prompts: list[list[int]] = prompts,
            ) -> dict[str, tuple[float, float]]:
                return {
                    policy: await run_policy(policy, f"{number}-{attempt}-{policy}", prompts)
                    for policy in order
                }

            results = await measured.turns.take(turn)
            for policy in policies:
                rate, cached = results[policy]
                measured.rates.setdefault(policy, []).append(rate)
                measured.cached.setdefault(policy, []).append(cached)
    return measured
