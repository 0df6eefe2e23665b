"""Routing to schedule, drawn in the shapes of known models."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.schedule.aebs import replica_table

TOPICS = 16
# Standard deviations of logits, beside a choice's own Gumbel noise.
POPULARITY, TOPICALITY = 0.7, 1.0

Rows = NDArray[np.int64]  # [rows, k]: the experts of each row of one layer


@dataclass(frozen=True)
class RoutingShape:
    """A model's routing, and the instances that hold its experts."""

    num_experts: int
    top_k: int
    fleets: tuple[tuple[int, int], ...]  # instances, slots of each
    batches: tuple[int, ...] = (16, 64, 256, 512)  # rows
    num_groups: int = 1
    topk_group: int = 1


# An instance has room for 25 experts of DeepSeek-V2's size, since 200 of these fill eight instances (JANUS section
# 5.3), and so for 37 of two thirds of it.
SHAPES = {
    "deepseek-v2": RoutingShape(160, 6, ((8, 25), (16, 12), (16, 25)), num_groups=8, topk_group=3),
    "scaled-ds-1": RoutingShape(160, 8, ((8, 37), (16, 37)), num_groups=8, topk_group=3),
    "scaled-ds-2": RoutingShape(200, 8, ((8, 25), (16, 25)), num_groups=8, topk_group=3),
    "qwen3-235b": RoutingShape(128, 8, ((8, 20), (16, 12))),
}


def drawn_layer(shape: RoutingShape, num_rows: int, rng: np.random.Generator) -> Rows:
    """Draw rows of one layer: some experts are popular, and rows of one topic like the same ones."""
    popularity = POPULARITY * rng.standard_normal(shape.num_experts)
    topics = TOPICALITY * rng.standard_normal((TOPICS, shape.num_experts))
    logits = popularity + topics[rng.integers(0, TOPICS, num_rows)]
    logits += rng.gumbel(size=logits.shape)
    grouped = logits.reshape(num_rows, shape.num_groups, -1)
    best = np.argsort(-grouped.max(axis=2), axis=1)[:, : shape.topk_group, None]
    kept = np.full_like(grouped, -np.inf)
    np.put_along_axis(kept, best, np.take_along_axis(grouped, best, axis=1), axis=1)
    return np.argsort(-kept.reshape(logits.shape), axis=1)[:, : shape.top_k]


def placed(rows: Rows, num_experts: int, fleet: tuple[int, int]) -> NDArray[np.int32]:
    """Make a replica table: slots beyond one for each expert go to the expert with most rows per replica.

    An expert's replicas go to the instances with most free slots, of those to the ones with fewest rows.
    """
    num_instances, num_slots = fleet
    counts = np.bincount(rows.flatten(), minlength=num_experts).astype(float)
    num_replicas = np.ones(num_experts, np.int64)
    for _ in range(min(num_instances * num_slots, num_instances * num_experts) - num_experts):
        wanted = np.where(num_replicas < num_instances, counts / num_replicas, -1.0)
        num_replicas[wanted.argmax()] += 1
    slots: list[list[int]] = [[] for _ in range(num_instances)]
    load = np.zeros(num_instances)
    for expert in np.lexsort((-counts, -num_replicas)).tolist():
        used = np.array([len(experts) for experts in slots])
        for instance in np.lexsort((load, used))[: num_replicas[expert]].tolist():
            slots[instance].append(expert)
            load[instance] += counts[expert] / num_replicas[expert]
    assert max(map(len, slots)) <= num_slots
    return replica_table(slots, num_experts)


def batches_of(rows: Rows, size: int, count: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Draw batches as decoding has them: rows from anywhere, for each is of another sequence."""
    for _ in range(count):
        yield rows[rng.choice(len(rows), size, replace=False)]
