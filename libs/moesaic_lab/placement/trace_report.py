"""Figures of a trace: choices of its traffic, and results of placements and schedules for it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.schedule.aebs import replica_table
from moesaic.placement.schedule.serving import activated_experts
from moesaic.placement.traffic.statistics import LayerTraffic
from moesaic.placement.traffic.trace import Phase, Trace, TracedStep, layer_batches
from moesaic_lab.placement.policies import ALL_POLICIES
from moesaic_lab.scheduling.policies import SCHEDULES

COMPARED = ("aebs", "first", "random_per_expert", "token_balanced", "metro")
PHASES: tuple[Phase, ...] = ("decode", "prefill", "mixed")


def part_facts(trace: Trace) -> list[dict[str, Any]]:
    """Figures of each part and phase that has steps; means over layers."""
    return [
        {"part": part, "phase": phase, **_facts(steps, trace.num_experts)}
        for part in trace.parts
        for phase in PHASES
        if (steps := trace.selected([part], [phase]))
    ]


def _facts(steps: Sequence[TracedStep], num_experts: int) -> dict[str, Any]:
    layers = traffic_of(steps, num_experts)
    fractions = [layer.tokens / layer.tokens.sum() for layer in layers]
    rows = sum(step.topk_ids.shape[1] for step in steps)
    return {
        "steps": len(steps),
        "rows": rows,
        "rows_per_step": rows / len(steps),
        "activated_share": float(
            np.mean([layer.active_batches.sum() / layer.batches for layer in layers])
        )
        / num_experts,
        "busiest_share": float(np.mean([each.max() for each in fractions])),
        "entropy_bits": float(np.mean([-(f[f > 0] * np.log2(f[f > 0])).sum() for f in fractions])),
        "coactivation_lift": float(np.mean([_lift(layer) for layer in layers])),
    }


def _lift(layer: LayerTraffic) -> float:
    """Rows that chose the most frequent pair, over those expected of experts chosen independently."""
    pair = int(layer.coactivation.argmax())
    i, j = divmod(pair, len(layer.tokens))
    expected = layer.tokens[i] * layer.tokens[j] / max(layer.rows, 1.0)
    return float(layer.coactivation[i, j] / expected) if expected > 0 else 0.0


def traffic_of(steps: Sequence[TracedStep], num_experts: int) -> tuple[LayerTraffic, ...]:
    """The traffic of some steps, layer by layer."""
    return tuple(
        LayerTraffic.of_batches(layer_batches(steps, idx), num_experts)
        for idx in range(len(steps[0].topk_ids))
    )


def halves(trace: Trace, phases: Iterable[Phase]) -> tuple[list[TracedStep], list[TracedStep]]:
    """Split each part's steps of these phases: the first half to place by, the second to measure on."""
    seen, held_out = [], []
    for part in trace.parts:
        steps = trace.selected([part], phases)
        seen += steps[: len(steps) // 2]
        held_out += steps[len(steps) // 2 :]
    return seen, held_out


def evenly(steps: Sequence[TracedStep], count: int) -> list[TracedStep]:
    """Choose at most ``count`` of the steps, evenly spaced."""
    if len(steps) <= count:
        return list(steps)
    return [steps[int(at)] for at in np.linspace(0, len(steps) - 1, count).round()]


def largest_by_policy(
    trace: Trace,
    slots: Sequence[int],
    batches: int,
    policies: Iterable[str] = ("uniform", "eplb", "janus"),
) -> dict[str, dict[str, dict[str, float]]]:
    """Mean activated experts on the fullest instance, by phase, placement policy and schedule.

    Placed by the first half of each part, measured on the second; a phase without two steps of one
    part is left out.

    Raises:
        PlacementInfeasible: the slots cannot hold every expert.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for phase in PHASES:
        seen, held_out = halves(trace, [phase])
        if not seen or not held_out:
            continue
        problem = PlacementProblem(traffic=traffic_of(seen, trace.num_experts), slots=tuple(slots))
        steps = evenly(held_out, batches)
        found[phase] = {
            name: {
                schedule: float(np.mean(fullest(ALL_POLICIES[name](problem), steps, schedule)))
                for schedule in COMPARED
            }
            for name in policies
        }
    return found


def fullest(
    placed: Sequence[Slots], steps: Sequence[TracedStep], schedule: str
) -> NDArray[np.int64]:
    """Activated experts on the fullest instance, int64 ``[L, steps]``.

    Args:
        placed: ``[L][N][slots]``.
        steps: to schedule.
        schedule: a name of ``scheduling.policies.SCHEDULES``; random ones draw from a fixed seed.
    """
    counts: NDArray[np.int64] = activated(placed, steps, schedule).max(axis=2)
    return counts


def activated(
    placed: Sequence[Slots], steps: Sequence[TracedStep], schedule: str
) -> NDArray[np.int64]:
    """Activated experts on every instance, int64 ``[L, steps, N]``; see ``fullest``."""
    choose, rng = SCHEDULES[schedule], np.random.default_rng(0)
    num_experts = 1 + max(expert for layer in placed for held in layer for expert in held)
    counts = np.zeros((len(placed), len(steps), len(placed[0])), np.int64)
    for idx, slots in enumerate(placed):
        replicas = replica_table(slots, num_experts)
        for at, topk_ids in enumerate(layer_batches(steps, idx)):
            ids = topk_ids.astype(np.int64)
            served = choose(ids, replicas, rng)
            counts[idx, at] = activated_experts(ids, served, num_experts, len(slots))
    return counts
