"""Evenness of activated experts over instances, by the way in which replicas are chosen, beside the exact optimum.

Every policy schedules the same batches on the same placement, whose replicas were counted on another part of the same
routing. ``max_activated``: the mean over batches of the largest number of distinct experts on any instance; a
memory-bound layer waits for that one. ``spread``: largest less smallest.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.aebs.routing import (
    POPULARITY,
    SHAPES,
    TOPICALITY,
    TOPICS,
    RoutingShape,
    Rows,
    batches_of,
    drawn_layer,
    placed,
)
from benchmarks.common.routing_traces import DEMO_FLEETS, KINDS, demo_trace
from moesaic.kernels import aebs
from moesaic.native.library import library
from moesaic.placement.schedule.aebs import Costs, memory_bound, schedule_experts
from moesaic.placement.schedule.serving import activated_experts
from moesaic_lab.placement.trace_report import evenly, halves
from moesaic_lab.scheduling.policies import SCHEDULES

DRAWN_ROWS = 6000  # of each layer, half of them to count replicas on
NO_HELP = 0.02  # a gain over random choice below this is none
TARGETS = {"gap_to_optimum": 0.01, "id_order_gap": 0.05, "cpu_us": 30.0, "kernel_us": 20.0}


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the time of a decision, which may need a lent device, then all shapes."""
    times = _times(quick)
    yield {"config": {}, "figures": times, "notes": []}
    layers, batches, steps = (2, 4, 16) if quick else (4, 8, 80)
    rng = np.random.default_rng(0)
    figures: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        drawn = [drawn_layer(shape, DRAWN_ROWS, rng) for _ in range(layers)]
        figures[name] = _fleets(shape, drawn, batches, rng)
    figures["demo"] = _recorded(steps, rng)
    cases = {
        f"{name}, {fleet}, {rows}": case
        for name, fleets in figures.items()
        for fleet, sizes in fleets.items()
        for rows, case in sizes.items()
    }
    without_help = [name for name, case in cases.items() if case["gain_over_random"] < 1 + NO_HELP]
    yield {
        "config": {
            "shapes": {name: vars(shape) for name, shape in SHAPES.items()},
            "layers": {"drawn": layers, "demo": "all"},
            "batches_per_layer": {"drawn": batches, "demo": steps},
            "drawn_rows": DRAWN_ROWS,
            "drawn_from": {"topics": TOPICS, "sd": [POPULARITY, TOPICALITY], "noise": "Gumbel"},
        },
        "figures": {
            **figures,
            "worst_gap_to_optimum": max(case["gap_to_optimum"] for case in cases.values()),
            "worst_gap_unimproved": max(case["fewest_first_gap"] for case in cases.values()),
            "worst_gap_in_id_order": max(case["id_order_gap"] for case in cases.values()),
            "no_help": without_help,
            **times,
            "targets": TARGETS,
        },
        "paper": {
            "spread": "about 8 with random replicas, about 4 with JANUS, at all batch sizes (fig. 11)",
            "scheduling_us": "below 100 for 16 to 512 rows, 8 and 16 H100 (fig. 12)",
        },
        "notes": [
            "the optimum is exact at every size: experts that cost the same form a semi-matching, which is optimal if "
            "no path of moves improves it; no bound stands in for it",
            "gaps are of mean largest counts; gain_over_random: random choice per expert over ours, 1 is no gain",
            f"no_help: gains below {NO_HELP:.0%}. Without spare slots there is nothing to choose. With few of them the "
            "gain shrinks as more experts are active, since what has one replica decides; see active_share",
            "drawn routing is synthetic; the demo's are the steps of a real suite that answered twelve task sets "
            "(benchmarks/data): replicas are counted on the first half of each set, steps are of the second",
            "slots per instance follow JANUS section 5.3, where 200 experts of DeepSeek-V2's size fill 8 instances; "
            "its own are not printed, nor is its routing, so its figures are beside ours, not the same experiment",
            "cpu_us: 512 rows of 8 of 160 experts on 16 instances, tensors in, tensors out; cpu_us_16_rows: for 16",
            *(
                []
                if torch.cuda.is_available()
                else ["kernel_us: no CUDA device here, not measured"]
            ),
            *(["quick: fewer layers, batches and tokens, the same code path"] if quick else []),
        ],
    }


def _fleets(
    shape: RoutingShape, layers: Sequence[Rows], batches: int, rng: np.random.Generator
) -> dict[str, Any]:
    return {
        f"{fleet[0]}x{fleet[1]}_slots": {
            f"{size}_rows": _case(shape, fleet, layers, size, batches, rng)
            for size in shape.batches
        }
        for fleet in shape.fleets
    }


def _case(
    shape: RoutingShape,
    fleet: tuple[int, int],
    layers: Sequence[Rows],
    size: int,
    batches: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    halved = [(rows[: len(rows) // 2], rows[len(rows) // 2 :]) for rows in layers]
    return _measured(
        [
            (placed(counted, shape.num_experts, fleet), list(batches_of(rest, size, batches, rng)))
            for counted, rest in halved
        ],
        rng,
    )


def _recorded(steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """Measure the demo model's recorded steps, in the batches in which they ran."""
    trace = demo_trace()
    figures: dict[str, Any] = {}
    for instances, slots in DEMO_FLEETS:
        figures[f"{instances}x{slots}_slots"] = cases = {}
        for kind, phases in KINDS.items():
            counted, held_out = halves(trace, phases)
            measured = evenly(held_out, steps)
            layers = []
            for idx in range(len(trace.layers)):
                rows = np.concatenate([step.topk_ids[idx] for step in counted])
                replicas = placed(rows.astype(np.int64), trace.num_experts, (instances, slots))
                layers.append(
                    (replicas, [step.topk_ids[idx].astype(np.int64) for step in measured])
                )
            cases[kind] = _measured(layers, rng)
    return figures


def _measured(
    layers: Sequence[tuple[NDArray[np.int32], Sequence[Rows]]], rng: np.random.Generator
) -> dict[str, Any]:
    """Measure every policy on the same batches; each layer has its own, beside its replica table."""
    counts: dict[str, list[Any]] = {name: [] for name in SCHEDULES}
    active = []
    for replicas, batches in layers:
        num_experts, num_instances = replicas.shape
        for topk_ids in batches:
            active.append(len(np.unique(topk_ids)) / num_experts)
            for name, policy in SCHEDULES.items():
                served = policy(topk_ids, replicas, rng)
                counts[name].append(activated_experts(topk_ids, served, num_experts, num_instances))
    largest = {name: float(np.max(c, axis=1).mean()) for name, c in counts.items()}
    spread = {name: float(np.ptp(c, axis=1).mean()) for name, c in counts.items()}
    return {
        "active_share": round(statistics.mean(active), 3),
        "max_activated": {name: round(value, 3) for name, value in largest.items()},
        "spread": {name: round(value, 2) for name, value in spread.items()},
        "gap_to_optimum": round(largest["aebs"] / largest["optimum"] - 1, 4),
        "fewest_first_gap": round(largest["fewest_first"] / largest["optimum"] - 1, 4),
        "id_order_gap": round(largest["id_order"] / largest["optimum"] - 1, 4),
        "gain_over_random": round(largest["random_per_expert"] / largest["aebs"], 3),
    }


def _times(quick: bool) -> dict[str, Any]:
    """Time a decision for 512 rows of 8 experts out of 160 on 16 instances, and one for 16 rows.

    Here numpy and the compiled code are timed, on a GPU the kernels, too.
    """
    shape, fleet = SHAPES["scaled-ds-1"], (16, 12)
    rows = drawn_layer(shape, DRAWN_ROWS, np.random.default_rng(1))
    replicas = placed(rows, shape.num_experts, fleet)
    few, many = (rows[:count].astype(np.int32) for count in (16, 512))
    on_cpu = partial(_schedule, replicas, torch.device("cpu"))
    figures: dict[str, Any] = {
        "numpy_us": _median_us(lambda: schedule_experts(many, replicas), 20 if quick else 100)
    }
    if library() is not None:
        figures["cpu_us"] = _median_us(on_cpu(many), 200 if quick else 2000)
        figures["cpu_us_16_rows"] = _median_us(on_cpu(few), 200 if quick else 2000)
    if torch.cuda.is_available():
        from benchmarks.kernels.bench import Timer

        on_gpu = _schedule(replicas, torch.device("cuda"), many)
        figures["kernel_us"], figures["kernel_us_quartiles"] = Timer(50)(on_gpu)
    return figures


def _schedule(
    replicas: NDArray[np.int32], device: torch.device, topk_ids: NDArray[np.int32]
) -> Callable[[], object]:
    """A function that decides about one batch, whose arrays lie on ``device`` already."""
    num_instances = replicas.shape[1]
    ids, table = torch.from_numpy(topk_ids).to(device), torch.from_numpy(replicas).to(device)
    live = torch.ones(num_instances, dtype=torch.bool, device=device)
    ones = memory_bound(num_instances)
    weights, row = (torch.from_numpy(each).to(device) for each in (ones.weights, ones.row))
    costs, load = Costs(weights, row), torch.zeros_like(row)
    return lambda: aebs.schedule_experts(ids, table, live, load, costs)


def _median_us(decide: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        decide()
        times.append(1e6 * (time.perf_counter() - started))
    return round(statistics.median(times), 1)
