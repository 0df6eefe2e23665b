"""Figures of an arm of the real run, and its latencies and numbers of workers over time."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.brownout_burst.figures import BurstTargets, between, p90
from benchmarks.elastic.operator import ElasticSample
from moesaic.cli.load.generator import TimedRequest
from moesaic.v1 import scheduler_pb2 as pb

STEP_S = 2.0


def arm_figures(
    requests: Sequence[TimedRequest],
    samples: Sequence[ElasticSample],
    decisions: Sequence[pb.ScalingDecision],
    targets: BurstTargets,
    end_s: float,
    cool_down_s: float,
) -> dict[str, Any]:
    """Gather the figures of an arm."""
    kept = [
        r.complete and r.ttft_s <= targets.ttft_s and r.tpot_s <= targets.tpot_s for r in requests
    ]
    shed = [r for r in requests if r.was_shed]
    given = [r for r in requests if r.complete]
    adopted = [d for d in decisions if d.adopted and d.cause != "operator"]
    return {
        "requests": len(requests),
        "sla_kept_share": round(fmean(kept), 4) if kept else None,
        "lost_requests": sum(not r.complete and not r.was_shed for r in requests),
        "shed_requests": len(shed),
        "ttft_p90_s": round(p90([r.ttft_s for r in given]), 4),
        "tpot_p90_s": round(p90([r.tpot_s for r in given]), 4),
        "right_of_answered": round(fmean(r.right for r in given), 4) if given else None,
        "degraded_share": round(fmean(r.degraded_share for r in given), 4) if given else None,
        "worker_seconds": round(worker_seconds(samples, end_s), 1),
        "actions": len(adopted),
        "bridged_actions": sum(d.bridged for d in adopted),
        "flaps": flaps(adopted, cool_down_s),
        "action_s": [round(d.seconds, 2) if d.HasField("seconds") else None for d in adopted],
        "decisions": [_told(d) for d in adopted],
    }


def worker_seconds(samples: Sequence[ElasticSample], end_s: float) -> float:
    """Add up the seconds of active workers, each sample holding until the next one."""
    total = 0.0
    for here, there in zip(samples, [*samples[1:], None], strict=True):
        until_s = min(end_s, there.at_s if there is not None else end_s)
        total += max(0.0, until_s - here.at_s) * (here.attention + here.experts)
    return total


def flaps(adopted: Sequence[pb.ScalingDecision], cool_down_s: float) -> int:
    """Count the actions that take back one of less than two cool-downs before, without need."""
    count = 0
    for before, after in pairwise(adopted):
        opposite = _grows(before) != _grows(after)
        soon = after.at - before.at < 2 * cool_down_s
        count += opposite and soon and after.cause not in ("slo", "queue")
    return count


def _grows(decision: pb.ScalingDecision) -> bool:
    before, wanted = decision.before, decision.wanted
    return wanted.attention > before.attention or wanted.experts > before.experts


def _told(decision: pb.ScalingDecision) -> str:
    before, wanted = decision.before, decision.wanted
    shapes = f"{before.attention}A{before.experts}E to {wanted.attention}A{wanted.experts}E"
    bridged = f", bridged at {decision.prefill_threshold:.2f}" if decision.bridged else ""
    return f"{decision.cause}: {shapes}{bridged}: {decision.reason}"


def series_of(
    requests: Sequence[TimedRequest],
    samples: Sequence[ElasticSample],
    decisions: Sequence[pb.ScalingDecision],
    started_s: float,
    end_s: float,
) -> dict[str, Any]:
    """Gather lists by steps of two seconds; ``started_s`` is the arm's start by the wall clock."""
    steps = [at * STEP_S for at in range(round(end_s / STEP_S))]
    due = [between(requests, at, at + STEP_S) for at in steps]
    given = [[r for r in own if r.complete] for own in due]
    seen = [[s for s in samples if at <= s.at_s < at + STEP_S] for at in steps]

    def mean(name: str) -> list[float | None]:
        return [round(fmean(getattr(s, name) for s in own), 3) if own else None for own in seen]

    return {
        "step_s": STEP_S,
        "due_per_s": [len(own) / STEP_S for own in due],
        "ttft_p90_s": [round(p90([r.ttft_s for r in own]), 4) if own else None for own in given],
        "tpot_p90_s": [round(p90([r.tpot_s for r in own]), 4) if own else None for own in given],
        "attention": mean("attention"),
        "experts": mean("experts"),
        "prefill_threshold": mean("prefill_threshold"),
        "decode_threshold": mean("decode_threshold"),
        "decided_at_s": [round(d.at - started_s, 2) for d in decisions if d.adopted],
    }
