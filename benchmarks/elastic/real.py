"""A suite whose workers come from standby and go back, under a load that doubles and halves three times.

The same arrivals meet the suite in three arms: the small shape, all workers at once, and numbers of
workers that the scheduler decides. In the last arm its process is killed in the middle of an
action. Brownout is on in all arms; in the last it bridges the time until workers have come.
Capacities and targets are measured before, in the same run.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.brownout_burst.arms import OFF
from benchmarks.brownout_burst.arrivals import RateStretch, arrivals, azure_gaps
from benchmarks.brownout_burst.figures import BurstTargets, p90
from benchmarks.brownout_burst.point import BurstPoint
from benchmarks.brownout_burst.questions import BurstQuestions
from benchmarks.common.cpu_shares import cpu_shares
from benchmarks.common.pictures import draw_for_docs
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.wide_experts import widen_experts
from benchmarks.elastic.operator import ElasticOperator, ElasticSample
from benchmarks.elastic.picture import draw
from benchmarks.elastic.real_figures import arm_figures, series_of
from moesaic.cli.load.generator import CHAT, LoadClient, TimedRequest
from moesaic.v1 import scheduler_pb2 as pb

ARMS = ("small", "large", "auto")
PICTURE = "elastic-run.png"
NOTES = (
    "real run: targets are target_factor times the 90th percentiles of the small shape at the low rate; kept: a whole "
    "answer whose first token, and mean of the later ones, were within both; counted from when requests were due",
    "lost: requests that were accepted and got no whole answer, or an error; shed ones are told to come back",
    "flaps: actions that take back one of less than two cool-downs before, though no target was missed meanwhile",
    "worker_seconds: of active workers, from the first arrival to the last",
    "scheduler_killed: SIGKILL right after it had decided to add workers; the next leader goes on from the action",
    "one machine: each worker is held to a part of a core, so that one more brings what it has; held_to_cores says "
    "if that was possible. The gateway, the scheduler and the client share the rest",
)


@dataclass(frozen=True)
class ElasticPoint:
    """The operating point of the real run.

    Attributes:
        cores: that each worker has, by the kernel: so one more is as much more as a device would be.
        wider: copies of each neuron of the demo model's experts, so that experts are most of the work.
        max_num_seqs: sequences in one step.
        low_share: low rate, as a share of the small shape's capacity.
        factor: the high rate over the low one.
        doublings: times that the load doubles and halves.
        stretch_s: seconds at one rate.
        target_factor: targets over the latencies of the small shape at the low rate.
        interval_s: between decisions.
        cool_down_s: after an action.
        window_s: seconds of arrivals that decisions look at.
        capacity_s: seconds of the closed loop that measures a capacity.
        targets_s: seconds of the calm stretch that targets are taken from.
        settle_s: most seconds after the last answer until the fleet is small again.
    """

    cores: float = 0.35
    wider: int = 8
    max_num_seqs: int = 16
    low_share: float = 0.55
    factor: float = 2.0
    doublings: int = 3
    stretch_s: float = 30.0
    target_factor: float = 4.0
    interval_s: float = 2.0
    cool_down_s: float = 8.0
    window_s: float = 16.0
    capacity_s: float = 12.0
    targets_s: float = 25.0
    settle_s: float = 60.0

    @property
    def end_s(self) -> float:
        """Seconds in which requests arrive."""
        return (2 * self.doublings + 1) * self.stretch_s


POINT = ElasticPoint()
QUICK = replace(
    POINT, doublings=1, stretch_s=8.0, capacity_s=4.0, targets_s=5.0, settle_s=10.0, cool_down_s=3.0
)
FLAGS = (
    *("--topology", "disaggregated", "--slots-per-layer", "32"),
    *("--attention", "1", "--experts", "1", "--standby-attention", "1", "--standby-experts", "1"),
)
WORKERS = ("attention-0", "attention-1", "expert-0", "expert-1")
SMALL, LARGE = pb.FleetShape(attention=1, experts=1), pb.FleetShape(attention=2, experts=2)
MANY = "8192"  # requests that wait: none is refused by the length of a queue
SETTINGS = {
    "MOESAIC_THREADS": "1",
    "MOESAIC_LOAD_SHARE": "1",
    "MOESAIC_SETTLE_S": "0.2",
    "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
    "MOESAIC_MAX_INFLIGHT": MANY,
    "MOESAIC_MAX_NUM_QUEUED_REQS": MANY,
}


def measure(quick: bool) -> dict[str, Any]:
    """Run all arms; ``quick``: one doubling of seconds, and the picture is thrown away."""
    return asyncio.run(_measure(QUICK if quick else POINT, quick))


async def _measure(point: ElasticPoint, quick: bool) -> dict[str, Any]:
    burst = BurstPoint()
    questions = BurstQuestions(burst.kinds, 40 if quick else 200, burst.max_tokens)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / DEMO.name
        model.mkdir()
        widen_experts(DEMO, model, point.wider)
        settings = {**SETTINGS, "MOESAIC_MAX_NUM_SEQS": str(point.max_num_seqs)}
        with running_suite("--model", str(model), *FLAGS, **settings) as suite:
            pids = [suite.processes[name]["pid"] for name in WORKERS]
            with cpu_shares(pids, point.cores) as held:
                figures, series, rates = await _run(suite, point, questions)
    config = {**asdict(point), "held_to_cores": held, **rates}
    result = {"config": config, "figures": figures, "series": series}
    draw_for_docs(draw, result, PICTURE, quick)
    return {
        "config": {"real": config},
        "figures": {"real": figures},
        "paper": {},
        "notes": list(NOTES),
    }


async def _run(
    suite: RunningSuite, point: ElasticPoint, questions: BurstQuestions
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    async with AsyncExitStack() as stack:
        client = LoadClient(suite.port, CHAT)
        stack.callback(client.close)
        run = _Run(ElasticOperator(suite), client, point, questions)
        await run.operator.brownout(OFF)
        capacities = {}
        for name, shape in (("warm-up", LARGE), ("large", LARGE), ("small", SMALL)):
            await run.operator.scale(shape)
            capacities[name] = await run.capacity(name, LARGE.attention)
        low = capacities["small"] * point.low_share
        targets = await run.targets(low)
        rates = [low, low * point.factor] * point.doublings + [low]
        due = arrivals(azure_gaps(), [RateStretch(point.stretch_s, rate) for rate in rates])
        figures: dict[str, Any] = {
            "capacity_per_s": {name: round(capacities[name], 2) for name in ("small", "large")},
            "targets": {key: round(value, 4) for key, value in asdict(targets).items()},
        }
        series = {}
        for arm in ARMS:
            figures[arm], series[arm] = await run.arm(arm, due, targets)
        return figures, series, {"low_per_s": round(low, 2), "requests_of_an_arm": len(due)}


@dataclass(frozen=True)
class _Run:
    operator: ElasticOperator
    client: LoadClient
    point: ElasticPoint
    questions: BurstQuestions

    async def capacity(self, salt: str, attention: int) -> float:
        """Measure the requests a second that are answered when more wait than run."""
        clients, seconds = 2 * attention * self.point.max_num_seqs, self.point.capacity_s
        requests = await self.client.closed_loop(
            clients, lambda number: self.questions.body(number, salt), seconds=seconds
        )
        ended = [r for r in requests if r.complete and 0.25 * seconds <= r.end_s < seconds]
        return len(ended) / (0.75 * seconds)

    async def targets(self, per_s: float) -> BurstTargets:
        """Measure calm latencies without brownout, and allow some times as much."""
        due = arrivals(azure_gaps(), [RateStretch(self.point.targets_s, per_s)])
        requests = await self.client.open_loop(due, lambda n: self.questions.body(n, "targets"))
        answered = [request for request in requests if request.complete]
        factor = self.point.target_factor
        ttft_s, tpot_s = ([getattr(r, name) for r in answered] for name in ("ttft_s", "tpot_s"))
        return BurstTargets(factor * p90(ttft_s), factor * p90(tpot_s))

    async def arm(
        self, arm: str, due: list[float], targets: BurstTargets
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure one arm, and leave the small fleet without brownout."""
        operator, point = self.operator, self.point
        await operator.scale(LARGE if arm == "large" else SMALL)
        await operator.brownout(
            pb.BrownoutPolicy(mode="auto", slo_ttft_s=targets.ttft_s, slo_tpot_s=targets.tpot_s)
        )
        before = {decision.decision_id for decision in await operator.decisions()}
        if arm == "auto":
            await operator.scaling(
                pb.ScalingPolicy(
                    mode="auto",
                    interval_s=point.interval_s,
                    cool_down_s=point.cool_down_s,
                    window_s=point.window_s,
                )
            )
        samples: list[ElasticSample] = []
        async with operator.sampling(lambda: self.client.now_s, samples):
            killing = (
                asyncio.create_task(operator.kill_in_action(before)) if arm == "auto" else None
            )
            started_s = operator.wall_clock()
            requests = await self.client.open_loop(due, lambda n: self.questions.body(n, arm))
            if arm == "auto":
                await operator.until_shape(SMALL, point.settle_s)
            if killing is not None:
                killing.cancel()
        decisions = [d for d in await operator.decisions() if d.decision_id not in before]
        await operator.scaling(pb.ScalingPolicy(mode="off"))
        await operator.brownout(OFF)
        self._judge(requests)
        figures = arm_figures(requests, samples, decisions, targets, point.end_s, point.cool_down_s)
        if killing is not None:
            figures["scheduler_killed"] = killing.done() and not killing.cancelled()
            figures["told_to_work"] = operator.activations(since=started_s)
        return figures, series_of(requests, samples, decisions, started_s, point.end_s)

    def _judge(self, requests: list[TimedRequest]) -> None:
        for request in requests:
            request.right = request.complete and self.questions.is_right(
                request.number, request.token_ids
            )
