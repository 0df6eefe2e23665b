"""A burst of twice the requests on a whole suite: violations, refusals and right answers, by what brownout does.

A real trace of arrivals, its rate doubled from 75 s to 250 s, meets one suite over REST three
times. The arms are no brownout, the paper's control by thresholds alone, and queueing with
degrading and shedding. Capacity and targets are measured before, without brownout; rates follow
from them. Arrivals are an open loop: no request waits for earlier ones. Requests are held-out
questions of the demo model's tasks, so right answers can be counted.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.brownout_burst.arms import ARMS, OFF, BurstControl, burst_control, manual, policy_of
from benchmarks.brownout_burst.arrivals import RateStretch, arrivals, azure_gaps
from benchmarks.brownout_burst.figures import BurstSample, BurstTargets, arm_figures, p90
from benchmarks.brownout_burst.picture import draw
from benchmarks.brownout_burst.point import BurstPoint
from benchmarks.brownout_burst.questions import BurstQuestions
from benchmarks.brownout_burst.series import series_of
from benchmarks.common.pictures import draw_for_docs
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.wide_experts import widen_experts
from moesaic.cli.load.generator import CHAT, LoadClient, TimedRequest

POINT = BurstPoint()
QUICK = replace(
    POINT,
    questions_of_a_kind=20,
    calm_s=4.0,
    burst_s=6.0,
    tail_s=3.0,
    capacity_s=3.0,
    targets_s=4.0,
    settle_s=4.0,
)
PICTURE = "brownout-burst.png"
WARM_UP_PART = 0.2  # of a closed loop
MANY = "8192"  # requests that wait: no arm refuses by the length of a queue
LONG_QUEUES = {
    "MOESAIC_MAX_INFLIGHT": MANY,
    "MOESAIC_MAX_NUM_QUEUED_REQS": MANY,
}
PAPER = {
    "violations": {
        "ShareGPT": {"vLLM": [0.7368, 0.9885], "BrownoutServe": [0.0714, 0.0857]},
        "Alpaca": {"vLLM": [0.9429, 0.9886], "BrownoutServe": [0.0455, 0.0914]},
    },
    "of": "tokens, prefill and decode; Qwen1.5-MoE-A2.7B-Chat, the rate doubled from 75 s to 250 s (figure 12)",
}
NOTES = (
    "violations: shares of the requests due in the stretch; prefill: first token later than the target; decode: mean "
    "of the later tokens over it; a request that was refused or failed violates both",
    "later_tokens: tokens later than the target after the one before, as the paper counts; a request without an answer "
    "counts as many late ones as an answer has",
    "latencies count from when a request is due to when its client, on the same machine, has the token",
    "targets: target_factor times the 90th percentiles of a calm stretch of the run, first tokens and gaps",
    "seconds_over_target: seconds in which the 90th percentile of the requests that were due is over it, refused ones "
    "included",
    "until_exact_s: from the end of the burst; until no second is over a target any more: until_in_time_s",
    "arrivals: gaps of Azure's conversation trace of 2023 in their order, scaled within each stretch to its mean rate; "
    "lengths of prompts and answers are the questions' own",
    "accuracy: right answers among those given, before and in the burst; the same questions in each arm",
    "worker_ttft_p90_s, worker_tpot_p90_s: the middle of what the worker measured in its windows; what is more is "
    "the gateway's and the client's; sent_late_p90_s: the client's, before it sent",
    "model: the demo's, each neuron of its experts copied, which changes no answer but rounding and makes experts most "
    "of the work, as in larger models",
    "capacity_degraded_per_s: at thresholds 0",
    "client_cpu: share of one core that the client took",
    "prefixes are not shared: each request has a cache of its own",
)


def run(quick: bool) -> dict[str, Any]:
    """Measure all arms in turn, and draw them; ``quick``: a burst of seconds, and the picture is thrown away."""
    return asyncio.run(_run(QUICK if quick else POINT, quick))


async def _run(point: BurstPoint, quick: bool) -> dict[str, Any]:
    questions = BurstQuestions(point.kinds, point.questions_of_a_kind, point.max_tokens)
    settings = {"MOESAIC_MAX_NUM_SEQS": str(point.max_num_seqs), **LONG_QUEUES}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / DEMO.name
        model.mkdir()
        widen_experts(DEMO, model, point.wider)
        flags = ("--model", str(model), "--topology", point.topology)
        with running_suite(*flags, **settings) as suite:
            figures, series, rates = await _measured(suite, point, questions)
    config = {
        "model": DEMO.name,
        **asdict(point),
        "burst_end_s": point.burst_end_s,
        "questions": len(questions),
        **rates,
    }
    result = {"config": config, "figures": figures, "series": series}
    draw_for_docs(draw, result, PICTURE, quick)
    return {
        "config": config,
        "figures": figures,
        "series": series,
        "paper": PAPER,
        "notes": [
            *NOTES,
            *(["quick: a burst of seconds, the same code path"] if quick else []),
        ],
    }


async def _measured(
    suite: RunningSuite, point: BurstPoint, questions: BurstQuestions
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    async with AsyncExitStack() as stack:
        client = LoadClient(suite.port, CHAT)
        stack.callback(client.close)
        control = await stack.enter_async_context(burst_control(suite))
        bench = _Bench(control, client, point, questions)
        await bench.warm_up()
        before = await bench.capacity("before", point.capacity_s)
        await control.set(manual(point, 0.0))
        degraded = await bench.capacity("degraded", point.capacity_s)
        await control.set(OFF)
        capacity = (before + await bench.capacity("capacity", point.capacity_s)) / 2
        calm = capacity * point.calm_share
        targets = await bench.targets(calm)
        due = arrivals(
            azure_gaps(),
            [
                RateStretch(point.calm_s, calm),
                RateStretch(point.burst_s, calm * point.burst_factor),
                RateStretch(point.tail_s, calm),
            ],
        )
        rates = {
            "calm_per_s": round(calm, 2),
            "burst_per_s": round(calm * point.burst_factor, 2),
            "requests_of_an_arm": len(due),
        }
        figures: dict[str, Any] = {
            "capacity_per_s": round(capacity, 2),
            "capacity_degraded_per_s": round(degraded, 2),
            "targets": {key: round(value, 4) for key, value in asdict(targets).items()},
        }
        series: dict[str, Any] = {}
        for arm in ARMS:
            figures[arm], series[arm] = await bench.arm(arm, due, targets)
        return figures, series, rates


@dataclass(frozen=True)
class _Bench:
    control: BurstControl
    client: LoadClient
    point: BurstPoint
    questions: BurstQuestions

    async def warm_up(self) -> None:
        """Compute some answers at both ends of the thresholds, with the united experts of the way."""
        for threshold in (0.0, 1.0):
            await self.control.set(manual(self.point, threshold))
            await self.capacity(f"warm-up {threshold}", 2.0)
        await self.control.set(OFF)

    async def capacity(self, salt: str, seconds: float) -> float:
        """Measure the requests a second that are answered exactly when twice as many wait as run."""
        clients = 3 * self.point.max_num_seqs
        requests = await self.client.closed_loop(
            clients, lambda number: self.questions.body(number, salt), seconds=seconds
        )
        start = WARM_UP_PART * seconds
        ended = [r for r in requests if r.complete and start <= r.end_s < seconds]
        return len(ended) / (seconds - start)

    async def targets(self, calm: float) -> BurstTargets:
        """Measure calm latencies without brownout, and allow some times as much."""
        due = arrivals(azure_gaps(), [RateStretch(self.point.targets_s, calm)])
        requests = await self.client.open_loop(due, lambda n: self.questions.body(n, "targets"))
        answered = [r for r in requests if r.complete]
        ttft_s = p90([r.ttft_s for r in answered])
        tpot_s = p90([gap for r in answered for gap in r.gaps_s])
        return BurstTargets(self.point.target_factor * ttft_s, self.point.target_factor * tpot_s)

    async def arm(
        self, arm: str, due: list[float], targets: BurstTargets
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure one arm, and leave the suite without brownout."""
        await self.control.set(policy_of(arm, self.point, targets))
        samples: list[BurstSample] = []
        cpu, wall = time.process_time(), time.perf_counter()
        sampling = asyncio.create_task(self.control.sample(lambda: self.client.now_s, samples))
        try:
            requests = await self.client.open_loop(due, lambda n: self.questions.body(n, arm))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            await self.control.settled(samples, self.point.settle_s)
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
        await self.control.set(OFF)
        self._judge(requests)
        after = await self.capacity(f"after {arm}", self.point.capacity_s / 2)
        figures = arm_figures(requests, samples, targets, self.point)
        figures["capacity_after_per_s"] = round(after, 2)
        figures["client_cpu"] = round(cpu / wall, 3)
        return figures, series_of(requests, samples, self.point.end_s)

    def _judge(self, requests: list[TimedRequest]) -> None:
        for request in requests:
            request.right = request.complete and self.questions.is_right(
                request.number, request.token_ids
            )
