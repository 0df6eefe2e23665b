"""Times to place experts, and to note which are activated."""

import time
from dataclasses import replace

import numpy as np

from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.traffic.recorder import ActivationRecorder
from moesaic.placement.traffic.statistics import LayerTraffic
from moesaic_lab.placement.policies import ALL_POLICIES


def solve_seconds(shapes: dict[str, tuple[int, int, int, int]]) -> dict[str, dict[str, float]]:
    """Time every policy on all layers of each shape: layers, experts, instances, slots of each."""
    figures: dict[str, dict[str, float]] = {}
    rng = np.random.default_rng(0)
    for called, (layers, experts, instances, slots) in shapes.items():
        traffic = tuple(_skewed(experts, rng) for _ in range(layers))
        demand = rng.gamma(0.3, size=(instances, layers, experts))
        problem = PlacementProblem(traffic=traffic, slots=(slots,) * instances, demand=demand)
        figures[called] = {}
        for name, policy in ALL_POLICIES.items():
            policy(
                PlacementProblem(traffic=traffic[:1], slots=problem.slots, demand=demand[:, :1])
            )  # loads scipy
            started = time.perf_counter()
            policy(problem)
            figures[called][name] = round(time.perf_counter() - started, 3)
        started = time.perf_counter()
        ALL_POLICIES["optimal"](sharing_layers(problem))
        took = time.perf_counter() - started
        figures[called]["optimal, memory shared by layers"] = round(took, 3)
    return figures


def sharing_layers(problem: PlacementProblem) -> PlacementProblem:
    """Turn slots into memory for as many experts, which layers may share unevenly."""
    return replace(
        problem,
        slots=(problem.num_experts,) * problem.num_instances,
        memory=tuple((count * len(problem.traffic),) for count in problem.slots),
        expert_bytes=1,
    )


def record_us(num_rows: int, top_k: int, num_experts: int) -> float:
    """Measure the processor time to note one dispatch batch of one layer, with its part of the counting."""
    scores = np.random.default_rng(0).random((num_rows, num_experts))
    topk_ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    recorder, count = ActivationRecorder(num_experts), 200
    started = time.process_time()
    for _ in range(count):
        recorder.record(0, topk_ids)
    recorder.take(0.0).window(worker_id="", generation=0, model_digest="", epoch=0)
    return round(1e6 * (time.process_time() - started) / count, 1)


def _skewed(num_experts: int, rng: np.random.Generator) -> LayerTraffic:
    scores = 0.7 * rng.standard_normal(num_experts) + rng.gumbel(size=(640, num_experts))
    rows = np.argsort(-scores, axis=1)[:, :8]
    return LayerTraffic.of_batches(np.split(rows, 20), num_experts)
