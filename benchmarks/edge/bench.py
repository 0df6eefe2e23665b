"""Edge servers with little memory, as in DanceMoE's section IV: placements compared, and tasks that change places.

Three servers have a network each, with links that the kernel holds to a rate, and memory for a part of the experts.
Their users' tasks are those of the recorded trace whose routing differs most. Table II: placements of several policies
are planned by the scheduler for the traffic it has seen, and meet the same other prompts of it in turns. Then tasks of
two servers change places, with and without migrations. Then links are slow, exact and with fewer experts.
"""

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common.pictures import draw_for_docs
from benchmarks.common.routing_traces import demo_trace
from benchmarks.common.suite import DEMO, RunningSuite
from benchmarks.edge.counts import local_share_series
from benchmarks.edge.figures import OPTIMUM
from benchmarks.edge.picture import draw
from benchmarks.edge.point import EdgePoint
from benchmarks.edge.session import edge_session
from benchmarks.edge.slow_link import measure_thresholds
from benchmarks.edge.suite import edge_suite, links_are_permitted
from benchmarks.edge.swap import ARMS, STEP_S, SwapArm, swap_arm, swap_figures
from benchmarks.edge.table import compare_policies, tasks_of_sites
from benchmarks.edge.tasks import TaskPrompts, most_different, routing_parts, tasks_with_prompts
from moesaic.cli.terminal.console import say

POINT = EdgePoint()
QUICK = replace(
    POINT,
    policies=("eplb", "optimal"),
    settings=("specialised",),
    rounds=1,
    learn_s=8.0,
    measure_s=5.0,
    with_swap=False,
    thresholds=(),
)
PICTURE = "edge.png"
PAPER = {
    "mean_latency_s": {
        "specialised": {"uniform": 21.66, "redundance": 13.08, "smartmoe": 19.39, "eplb": 9.56, "dance": 6.63},
        "mixed": {"uniform": 30.65, "redundance": 17.70, "smartmoe": 29.77, "eplb": 14.93, "dance": 13.29},
    },
    "ratio_vs_eplb": {"specialised": 0.694, "mixed": 0.89},
    "latency_ratio_vs_staying": 0.9,
    "of": "DeepSeek-V2-Lite on three servers with 1, 1 and 2 GPUs, 500 Mbit/s (table II and section IV-B); its mixed "
    "setting has another data set on each server",
}  # fmt: skip
TARGETS = {
    "ratio_vs_eplb": "optimal, specialised: at most 0.7; best or equal in every setting",
    "swap": "1 migration after tasks changed places, 0 before; latency at most 0.9 of staying; no request fails",
}
NOTES = (
    "latencies count from when a request is due to when its client, on the same machine, has the whole answer",
    "local_share: choices of a server's requests whose experts are in slots there; remote_calls: the others",
    "messages: to another server, with the rows of one layer; away_share: of the time in expert layers",
    "predicted: by the demand that placements were planned from; other prompts of the same tasks were measured",
    "optimal has least cost, weighed by what a remote row costs each server; another may have fewer calls",
    "every policy has the same arrivals and prompts in a round, in reverse order in every second one",
    "mean_latency_s_of_rounds: lowest and highest; gemm_gflops: mean of probes before each stretch, none is repeated",
    "servers do not read experts from files while serving: those would count as local for any placement",
    "table: limits of memory are lifted while placements change, and stand again before anything is measured; swap: "
    "they stand always, so that migrations come in stages",
    "swap: seconds from when tasks of the first two servers changed places; local_back_s: until local shares are at "
    "90 % of what they were, to stay; latency_ratio_vs_staying: of requests due after the migration was in force",
    "slow_link: thresholds are those of brownout, with rows that make do with fewer experts",
)


def run(quick: bool) -> dict[str, Any]:
    """Measure all parts; ``quick``: two policies in one setting, and the picture is thrown away."""
    point = QUICK if quick else POINT
    trace = demo_trace()
    routing = routing_parts(trace)
    usable = {task: routing[task] for task in routing if task in tasks_with_prompts()}
    tasks, least_distance = most_different(usable, point.num_sites)
    say(f"tasks {', '.join(tasks)}: their routing is {least_distance:.2f} apart at least")
    linked = links_are_permitted(point)
    bench = _Bench(point, tasks, TaskPrompts(tasks), linked, len(trace.layers) * trace.top_k)
    figures, series = bench.measured()
    draw_for_docs(draw, {"figures": figures, "series": series}, PICTURE, quick)
    config = {"model": DEMO.name, **asdict(point), "tasks": tasks, "linked": linked}
    return {
        "config": {**config, "least_distance": round(least_distance, 3), "targets": TARGETS},
        "figures": figures,
        "series": series,
        "paper": PAPER,
        "notes": [
            *NOTES,
            *(
                ["no links: this machine lets agents have no networks of their own"]
                if not linked
                else []
            ),
            *(
                ["quick: two policies and one setting, the same code path; some 55 s"]
                if quick
                else []
            ),
        ],
    }


@dataclass(frozen=True)
class _Bench:
    point: EdgePoint
    tasks: tuple[str, ...]
    prompts: TaskPrompts
    linked: bool
    choices_per_token: int

    def measured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure part by part, each setting and arm on a suite of its own."""
        figures: dict[str, Any] = {}
        series: dict[str, Any] = {}
        for setting in self.point.settings:
            with edge_suite(self.point, linked=self.linked) as suite:
                told = asyncio.run(self._setting(suite, setting))
            figures[setting], series[setting] = told[:2]
            figures |= told[2]
        if self.point.with_swap:
            arms = {}
            for arm in ARMS:
                replan_s = self.point.replan_interval_s
                with edge_suite(self.point, linked=self.linked, replan_s=replan_s) as suite:
                    arms[arm] = asyncio.run(self._arm(suite, arm))
            figures["swap"] = swap_figures(arms, self.point)
            series["swap"] = {
                arm: {
                    "step_s": STEP_S,
                    "start_s": own.stretch.samples[0].at_s,
                    "local_share": local_share_series(own.stretch.samples, STEP_S),
                }
                for arm, own in arms.items()
            } | {"shift_s": self.point.steady_s}
        return figures, series

    async def _setting(
        self, suite: RunningSuite, setting: str
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        tasks, more = tasks_of_sites(setting, self.tasks), dict[str, Any]()
        async with edge_session(suite, self.point, self.prompts) as session:
            more["slots"] = await session.control.slots()
            figures, series, plans = await compare_policies(
                session, setting, tasks, self.choices_per_token
            )
            if setting == "specialised" and self.linked and self.point.thresholds:
                more["slow_link"] = await measure_thresholds(
                    session, suite, tasks, plans[OPTIMUM], self.choices_per_token
                )
        return figures, series, more

    async def _arm(self, suite: RunningSuite, arm: str) -> SwapArm:
        async with edge_session(suite, self.point, self.prompts) as session:
            return await swap_arm(session, tasks_of_sites("specialised", self.tasks), arm)
