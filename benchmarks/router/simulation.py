"""The router before more workers than this machine has cores for, in virtual time.

The router is real, and so are the engine's batching core and its prefix cache. A step takes as long as its FLOPs at a
fixed rate, and messages take a fixed time.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.common.suite import DEMO
from benchmarks.router.workload import Mix, Workload
from moesaic.engine.sequences.requests import Request, RequestKey, ScoringTask
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.limits import EngineLimits
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.flops import flops_of, saturation_of
from moesaic.prefix.block_hashes import BLOCK_SIZE, BlockHasher
from moesaic.prefix.policies import POLICY_NAMES, PolicyName
from moesaic.prefix.router import PrefixRouter, RouterLimits
from moesaic.prefix.shadows import Job

CONFIG = load_config(DEMO)
FLOPS = flops_of(CONFIG)
HASHER = BlockHasher(b"key", CONFIG.digest, BLOCK_SIZE)
STEP_TOKENS, KV_BLOCKS, CLIENTS_PER_WORKER = 2048, 1024, 16
FLOPS_PER_S = FLOPS.span(0, 1000) * 6  # about 6,000 tokens of short prompts
STEP_S = MESSAGE_S = 0.004  # the fixed time of a step, and of a message on its way
SCORING = ScoringTask(((1,),))
ENGINE = EngineLimits(
    max_num_seqs=64,
    max_num_batched_tokens=STEP_TOKENS,
    max_num_queued_reqs=1 << 20,
    max_num_queued_tokens=1 << 30,
    max_model_len=CONFIG.max_positions,
)


def simulate(workload: Workload, quick: bool) -> dict[str, Any]:
    """Simulate each fleet: each policy's throughput relative to ours, and the part of tokens that was cached."""
    fleets, seeds, mix = ((4,), (1,), Mix(60, 30, 30)) if quick else (
        (2, 4, 8), (1, 2, 3), Mix(120, 60, 60),
    )  # fmt: skip
    figures: dict[str, Any] = {}
    for workers in fleets:
        rates: dict[str, float] = {}
        cached: dict[str, float] = {}
        for policy in POLICY_NAMES:
            runs = [_Run(workload.prompts(mix, seed), policy, workers) for seed in seeds]
            rates[policy] = sum(run.tokens for run in runs) / sum(run.now_s for run in runs)
            cached[policy] = sum(run.cached for run in runs) / sum(run.tokens for run in runs)
        figures[f"{workers}_workers"] = {
            policy: {
                "ours_is_times": round(rates["prefix-flops"] / rate, 2),
                "cached_share": round(cached[policy], 3),
            }
            for policy, rate in rates.items()
        }
    return figures


class _Run:
    """One workload until it is done; as many clients ask as there is work for, each one request at a time."""

    def __init__(self, prompts: list[list[int]], policy: PolicyName, workers: int) -> None:
        self.now_s, self.cached, self.tokens = 0.0, 0, sum(map(len, prompts))
        self._prompts, self._todo = prompts, deque(range(len(prompts)))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._engines = [Batcher(ENGINE, KV_BLOCKS, HASHER) for _ in range(workers)]
        self._stepping = [False] * workers
        limits = RouterLimits(BLOCK_SIZE, 1 << 40, len(prompts), max_wait_s=1.0)
        self._router = PrefixRouter(FLOPS, limits, policy)
        for worker in range(workers):
            self._router.fleet.join(worker, saturation_of(CONFIG, STEP_TOKENS))
            self._router.fleet.accept(worker, True)
        for _ in range(CLIENTS_PER_WORKER * workers):
            self._ask()
        left = len(prompts)
        while left:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
            left = len(self._todo) + self._router.num_queued + len(self._router.fleet.routed)

    def _after(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), happens))

    def _ask(self) -> None:
        if self._todo:
            number, names = self._todo.popleft(), list[bytes]()
            HASHER.extend(names, HASHER.root(), self._prompts[number])
            self._router.submit(Job(number, len(self._prompts[number]), names), self.now_s)
            self._route()

    def _route(self) -> None:
        for decision in self._router.route(self.now_s):
            worker, number = decision.worker, decision.job.job_id
            self._after(MESSAGE_S, lambda w=worker, n=number: self._arrive(w, n))  # type: ignore[misc]  # defaults bind the loop's values
        if (overdue_s := self._router.next_overdue_s()) is not None:
            self._after(max(0.0, overdue_s - self.now_s), self._route)

    def _arrive(self, worker: int, number: int) -> None:
        request = Request(RequestKey(str(number)), tuple(self._prompts[number]), SCORING)
        self._engines[worker].submit(request)
        if not self._stepping[worker]:
            self._step(worker)

    def _step(self, worker: int) -> None:
        plan = self._engines[worker].plan()
        self._stepping[worker] = bool(plan.chunks)
        if plan.chunks:
            cost = sum(FLOPS.span(c.start, c.start + len(c.token_ids)) for c in plan.chunks)
            self._after(cost / FLOPS_PER_S + STEP_S, lambda: self._stepped(worker, plan))

    def _stepped(self, worker: int, plan: PlannedStep) -> None:
        engine, ended, under_way = self._engines[worker], [], {}
        for chunk in plan.chunks:
            engine.commit(chunk)
            number = int(chunk.sequence.request.key.request_id)
            if chunk.wanted:
                engine.finish(chunk.sequence)
                ended.append(number)
                self.cached += chunk.sequence.num_cached or 0
            else:
                under_way[number] = chunk.sequence.computed
        stored, evicted = engine.pool.take_changes()

        def told() -> None:
            fleet = self._router.fleet
            fleet.index.evict(fleet.workers[worker].bit, evicted)
            fleet.index.commit(fleet.workers[worker].bit, stored)
            for number, computed in under_way.items():
                fleet.progressed(number, computed, 0)
            for number in ended:
                self._router.withdraw(number)
            self._route()
            for _ in ended:
                self._ask()

        self._after(MESSAGE_S, told)
        self._step(worker)
