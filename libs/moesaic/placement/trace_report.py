"""What a trace shows: how traffic chose, and what placements and schedules make of it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.placement import replica_choices
from moesaic.placement.aebs import replica_table
from moesaic.placement.policies import POLICIES
from moesaic.placement.problem import Problem
from moesaic.placement.statistics import LayerTraffic
from moesaic.placement.trace import Phase, Trace, TracedStep, layer_batches
from moesaic.placement.uniform import Slots

SCHEDULES = ("aebs", "first", "random_per_expert", "token_balanced", "metro")
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
    shares = [layer.tokens / layer.tokens.sum() for layer in layers]
    rows = sum(step.topk_ids.shape[1] for step in steps)
    return {
        "steps": len(steps),
        "rows": rows,
        "rows_per_step": rows / len(steps),
        "activated_share": float(
            np.mean([layer.active_batches.sum() / layer.batches for layer in layers])
        )
        / num_experts,
        "busiest_share": float(np.mean([share.max() for share in shares])),
        "entropy_bits": float(np.mean([-(s[s > 0] * np.log2(s[s > 0])).sum() for s in shares])),
        "coactivation_lift": float(np.mean([_lift(layer) for layer in layers])),
    }


def _lift(layer: LayerTraffic) -> float:
    """Of the most frequent pair: rows that chose both, over those expected of experts that are
    chosen independently."""
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
    """The first half of each part's steps of these phases, to place by, and the second, to measure
    on."""
    seen, held_out = [], []
    for part in trace.parts:
        steps = trace.selected([part], phases)
        seen += steps[: len(steps) // 2]
        held_out += steps[len(steps) // 2 :]
    return seen, held_out


def evenly(steps: Sequence[TracedStep], count: int) -> list[TracedStep]:
    """At most ``count`` of the steps, evenly spaced."""
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
        problem = Problem(traffic=traffic_of(seen, trace.num_experts), slots=tuple(slots))
        steps = evenly(held_out, batches)
        found[phase] = {
            name: {
                schedule: float(np.mean(fullest(POLICIES[name](problem), steps, schedule)))
                for schedule in SCHEDULES
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
        schedule: of ``replica_choices.POLICIES``; random ones draw from a fixed seed.
    """
    counts: NDArray[np.int64] = activated(placed, steps, schedule).max(axis=2)
    return counts


def activated(
    placed: Sequence[Slots], steps: Sequence[TracedStep], schedule: str
) -> NDArray[np.int64]:
    """Activated experts on every instance, int64 ``[L, steps, N]``; see ``fullest``."""
    choose, rng = replica_choices.POLICIES[schedule], np.random.default_rng(0)
    num_experts = 1 + max(expert for layer in placed for held in layer for expert in held)
    counts = np.zeros((len(placed), len(steps), len(placed[0])), np.int64)
    for idx, slots in enumerate(placed):
        replicas = replica_table(slots, num_experts)
        for at, topk_ids in enumerate(layer_batches(steps, idx)):
            ids = topk_ids.astype(np.int64)
            served = choose(ids, replicas, rng)
            counts[idx, at] = replica_choices.activated_experts(
                ids, served, num_experts, len(slots)
            )
    return counts
