"""Quality of the placements that policies make: on traffic they did not see, under AEBS, and in remote calls.

``max_activated``: mean over steps and layers of the largest number of distinct activated experts on any instance, with
AEBS choosing replicas. Every policy is given the first half of each task set's steps and measured on the second half,
all on the same steps, so differences to ``eplb`` are paired.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.aebs.routing import SHAPES, drawn_layer
from benchmarks.common.remote_calls import remote_calls
from benchmarks.common.routing_traces import KINDS, demo_trace
from benchmarks.placement.prediction import predictions
from benchmarks.placement.times import record_us, sharing_layers, solve_seconds
from moesaic.placement.evaluation.replay import activated_counts
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.schedule.aebs import replica_table
from moesaic.placement.traffic.statistics import MAX_KEPT_SAMPLES, Floats, LayerTraffic
from moesaic.placement.traffic.trace import Trace, TracedStep
from moesaic_lab.placement.policies import ALL_POLICIES
from moesaic_lab.placement.trace_report import evenly, halves, traffic_of

FLEETS = {"4x8": (8,) * 4, "4x10": (10,) * 4, "8x6": (6,) * 8, "8+12+20": (8, 12, 20)}
COMPARED = (
    "uniform", "redundance", "smartmoe", "eplb", "eplb-batches", "janus", "janus-unscaled", "janus-batches",
)  # fmt: skip
EDGE_SLOTS = (9, 9, 18)  # servers with one, one and two devices, as in DanceMoE section IV
FIRST_SETS = 6  # of the others, the model was not trained on three
SOLVED = {"demo": (8, 32, 4, 10), "26x64x3": (26, 64, 3, 28), "60x160x16": (60, 160, 16, 12)}
SAMPLES = (8, 32, 256)  # batches of a layer
NO_HELP = 0.02  # less than this is no help
RECORDED = {"32 rows, top-4 of 32": (32, 4, 32), "512 rows, top-8 of 160": (512, 8, 160)}
LARGEST = {"60x256x64": (60, 256, 64, 5)}
DRAWN = (("deepseek-v2", (8, 25)), ("deepseek-v2", (16, 12)), ("qwen3-235b", (8, 20)))

NOTES = (
    "less_than_eplb: the share by which max_activated is lower than of eplb, with the 95 % interval of paired "
    "differences over steps; steps of one set resemble each other, so the true interval is wider",
    "in 4x8 there are no spare slots, so placement alone decides; elsewhere AEBS evens out much of it",
    "remote: servers have a third of the task sets each; demand from the first half of the steps, calls on the second; "
    "share of (row, expert) choices that another server has to serve",
    "janus counts co-activation of rows, as the paper does; janus-batches that of up to 256 sampled batches",
    "solve_s: all layers, one run each, after scipy is loaded",
    "janus_batches_by_samples: less than eplb, decode on 4x10, lowest and highest of draws of so many batches",
    "record_us: processor time to note one dispatch batch of one layer, and its share of counting",
    "no_help: where what is named has no fewer activated experts on the fullest instance, or by less than the "
    "interval or 2 %",
    "prediction: predicted over what came then, most activated experts on one instance; less_work: what plans "
    "then brought, rows and weights counted; see benchmarks/placement/prediction.py",
)


def run(quick: bool) -> dict[str, Any]:
    """Measure held-out parts of the recorded trace, other task sets, drawn routing, remote calls and times."""
    trace, steps = demo_trace(), 24 if quick else 160
    fleets = dict(list(FLEETS.items())[:2]) if quick else FLEETS
    held_out = {
        kind: {
            name: _compared(
                *halves(trace, phases),
                trace.num_experts,
                slots,
                steps if kind == "decode" else steps // 2,
            )
            for name, slots in fleets.items()
        }
        for kind, phases in KINDS.items()
    }
    seen = trace.selected(trace.parts[:FIRST_SETS], KINDS["decode"])
    other = trace.selected(trace.parts[FIRST_SETS:], KINDS["decode"])
    gains = _gains(held_out)
    compared_others = _compared(seen, other, trace.num_experts, FLEETS["4x10"], steps)
    drawn = _drawn(2 if quick else 6)
    return {
        "config": {
            "trace": {
                "parts": list(trace.parts),
                "steps": len(trace.steps),
                "rows": trace.num_rows,
            },
            "fleets": fleets,
            "edge_slots": EDGE_SLOTS,
            "steps": steps,
        },
        "figures": {
            "held_out": held_out,
            "other_task_sets": compared_others,
            "janus_batches_by_samples": _by_samples(trace, steps, 1 if quick else 3),
            "drawn": drawn,
            "no_help": _no_help(
                {
                    f"{kind}, {name}": case
                    for kind, of in held_out.items()
                    for name, case in of.items()
                }
                | {"decode, 4x10, other task sets": compared_others}
                | {f"drawn, {name}": case for name, case in drawn.items()}
            ),
            "prediction": predictions(trace, steps),
            "remote": _remote(trace),
            "solve_s": solve_seconds(SOLVED if quick else {**SOLVED, **LARGEST}),
            "record_us": {name: record_us(*shape) for name, shape in RECORDED.items()},
            "less_than_eplb": gains,
        },
        "paper": {
            "janus": "gives no figure for placement alone (section 3.4)",
            "dance": "mean latency 30.6 % below EPLB for DeepSeek-V2-Lite (table II): time, not calls",
        },
        "notes": [
            *NOTES,
            *(["quick: fewer steps and fleets, the same code path"] if quick else []),
        ],
    }


def _compared(
    seen: Sequence[TracedStep],
    held_out: Sequence[TracedStep],
    num_experts: int,
    slots: tuple[int, ...],
    steps: int,
) -> dict[str, Any]:
    """Compare every policy's placement for the traffic seen, on the same held-out steps."""
    traffic = _as_a_scheduler_has_it(traffic_of(seen, num_experts))
    measured = evenly(held_out, steps)
    masks = [
        _masks([step.topk_ids[idx] for step in measured], num_experts)
        for idx in range(len(traffic))
    ]
    problem = PlacementProblem(traffic=traffic, slots=slots)
    counts = {name: _largest(ALL_POLICIES[name](problem), masks) for name in COMPARED}
    return _beside_eplb(counts)


def _by_samples(trace: Trace, steps: int, draws: int) -> dict[str, list[float]]:
    """Gain of ``janus-batches`` over ``eplb`` with fewer batches to learn from."""
    seen, held_out = halves(trace, KINDS["decode"])
    traffic, measured = traffic_of(seen, trace.num_experts), evenly(held_out, steps)
    masks = [
        _masks([step.topk_ids[idx] for step in measured], trace.num_experts)
        for idx in range(len(traffic))
    ]

    def largest(policy: str, layers: tuple[LayerTraffic, ...]) -> float:
        problem = PlacementProblem(traffic=layers, slots=FLEETS["4x10"])
        return float(_largest(ALL_POLICIES[policy](problem), masks)[0].mean())

    base, figures = largest("eplb", traffic), {}
    for count in SAMPLES:
        found = []
        for draw in range(draws):
            order = np.random.default_rng(draw).permutation(len(seen))[:count]
            fewer = tuple(replace(layer, sampled=layer.sampled[order]) for layer in traffic)
            found.append(1 - largest("janus-batches", fewer) / base)
        figures[str(count)] = [round(min(found), 4), round(max(found), 4)]
    return figures


def _as_a_scheduler_has_it(traffic: tuple[LayerTraffic, ...]) -> tuple[LayerTraffic, ...]:
    """Keep all counts, but only as many sampled batches as a scheduler does."""
    stride = -(-len(traffic[0].sampled) // MAX_KEPT_SAMPLES)
    return tuple(replace(layer, sampled=layer.sampled[::stride]) for layer in traffic)


def _masks(batches: Sequence[NDArray[Any]], num_experts: int) -> NDArray[np.bool_]:
    masks = np.zeros((len(batches), num_experts), bool)
    for mask, topk_ids in zip(masks, batches, strict=True):
        mask[topk_ids] = True
    return masks


def _largest(placed: Sequence[Slots], masks: Sequence[NDArray[np.bool_]]) -> Floats:
    """Activated experts of each step's fullest and emptiest instance, mean over layers, ``[2, steps]``."""
    found = []
    for slots, batches in zip(placed, masks, strict=True):
        replicas = replica_table(slots, batches.shape[1])
        loads = np.array([activated_counts(mask, replicas)[0] for mask in batches])
        found.append((loads.max(axis=1), loads.min(axis=1)))
    counts: Floats = np.mean(np.array(found, np.float64), axis=0)
    return counts


def _beside_eplb(counts: dict[str, Floats]) -> dict[str, Any]:
    base = counts["eplb"][0]
    figures = {}
    for name, (largest, smallest) in counts.items():
        less = base - largest
        interval = 1.96 * less.std(ddof=1) / np.sqrt(len(less)) if len(less) > 1 else 0.0
        figures[name] = {
            "max_activated": round(float(largest.mean()), 3),
            "spread": round(float((largest - smallest).mean()), 2),
            "less_than_eplb": round(float(less.mean() / base.mean()), 4),
            "plus_minus": round(float(interval / base.mean()), 4),
        }
    return figures


def _gains(held_out: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        f"{kind}, {fleet}": {
            name: f"{100 * of[name]['less_than_eplb']:+.1f} % +- {100 * of[name]['plus_minus']:.1f}"
            for name in ("janus", "eplb-batches", "janus-batches")
        }
        for kind, fleets in held_out.items()
        for fleet, of in fleets.items()
    }


def _no_help(cases: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """List the cases in which looking at traffic, or at experts active together, brings nothing."""
    found: dict[str, list[str]] = {}
    for what, policy, than in (
        ("eplb over dealing round", "eplb", "uniform"),
        ("janus over eplb", "janus", "eplb"),
        ("eplb-batches over eplb", "eplb-batches", "eplb"),
        ("janus-batches over eplb", "janus-batches", "eplb"),
    ):
        found[what] = [
            name
            for name, case in cases.items()
            if _less(case, policy, than)
            < max(NO_HELP, case[policy]["plus_minus"], case[than]["plus_minus"])
        ]
    return found


def _less(case: dict[str, Any], policy: str, than: str) -> float:
    return float(1 - case[policy]["max_activated"] / case[than]["max_activated"])


def _drawn(layers: int) -> dict[str, Any]:
    """Measure routing drawn in the shapes of known models, 64 rows a step."""
    figures = {}
    for name, (instances, slots) in DRAWN:
        shape, rng = SHAPES[name], np.random.default_rng(0)
        rows = [drawn_layer(shape, 6400, rng) for _ in range(layers)]
        batches = [np.split(layer, 100) for layer in rows]
        traffic = tuple(LayerTraffic.of_batches(layer[:50], shape.num_experts) for layer in batches)
        masks = [_masks(layer[50::5], shape.num_experts) for layer in batches]
        problem = PlacementProblem(traffic=traffic, slots=(slots,) * instances)
        counts = {policy: _largest(ALL_POLICIES[policy](problem), masks) for policy in COMPARED}
        figures[f"{name}, {instances}x{slots}"] = _beside_eplb(counts)
    return figures


def _remote(trace: Trace) -> dict[str, Any]:
    """Measure remote calls where every server has task sets of its own."""
    seen: list[Floats] = []
    held_out: list[Floats] = []
    for server in range(len(EDGE_SLOTS)):
        parts = set(trace.parts[server :: len(EDGE_SLOTS)])
        for half, into in zip(
            halves(trace, ("decode", "prefill", "mixed")), (seen, held_out), strict=True
        ):
            mine = [step for step in half if trace.parts[step.part] in parts]
            into.append(np.stack([layer.tokens for layer in traffic_of(mine, trace.num_experts)]))
    demand, then = np.stack(seen), np.stack(held_out)  # [N, L, E]
    demand, then = (
        d / d.sum(axis=(1, 2), keepdims=True) for d in (demand, then)
    )  # servers count alike
    traffic = traffic_of(halves(trace, ("decode", "prefill", "mixed"))[0], trace.num_experts)
    figures = {}
    for name, policy in ALL_POLICIES.items():
        for shared in (False, True) if name in ("dance", "optimal") else (False,):
            problem = PlacementProblem(traffic=traffic, slots=EDGE_SLOTS, demand=demand)
            placed = policy(sharing_layers(problem) if shared else problem)
            figures[name + (", memory shared by layers" if shared else "")] = {
                "seen": round(remote_calls(placed, demand) / demand.sum(), 4),
                "held_out": round(remote_calls(placed, then) / then.sum(), 4),
            }
    return figures
