"""Tasks of the servers: those whose routing differs most, by the recorded trace, and their prompts."""

from collections.abc import Collection, Mapping
from itertools import combinations

import numpy as np

from benchmarks.common.record_traces import CURRICULUM, DATA, SETS, drawn_rows, rows_of
from moesaic.placement.traffic.statistics import Floats
from moesaic.placement.traffic.trace import Trace


def routing_parts(trace: Trace) -> dict[str, Floats]:
    """Find the part of its rows that each task of a trace sends to each expert, float64 ``[L, E]``."""
    found = {}
    for task in trace.parts:
        counts = np.zeros((len(trace.layers), trace.num_experts))
        for step in trace.selected([task]):
            for layer, topk_ids in zip(counts, step.topk_ids, strict=True):
                layer += np.bincount(topk_ids.ravel(), minlength=trace.num_experts)
        found[task] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return found


def distance(one: Floats, other: Floats) -> float:
    """Total variation distance of two routings ``[L, E]``, in the mean over layers: 0 alike, 1 disjoint."""
    return float(0.5 * np.abs(one - other).sum(axis=1).mean())


def most_different(routing: Mapping[str, Floats], count: int) -> tuple[tuple[str, ...], float]:
    """Choose ``count`` tasks whose smallest distance is largest.

    Returns:
        The tasks, in the order in which they were given; the smallest distance of two of them.
    """
    apart = {
        pair: distance(routing[pair[0]], routing[pair[1]]) for pair in combinations(routing, 2)
    }
    least = {
        tasks: min(apart[pair] for pair in combinations(tasks, 2))
        for tasks in combinations(routing, count)
    }
    best = max(least, key=lambda tasks: least[tasks])
    return best, least[best]


def tasks_with_prompts() -> frozenset[str]:
    """Name the tasks of the trace whose rows are in this repository."""
    return frozenset((*SETS, *CURRICULUM))


class TaskPrompts:
    """Prompts of some tasks: every second one to learn from, the others to measure."""

    def __init__(self, tasks: Collection[str]) -> None:
        self._texts = {
            task: [
                row.text
                for row in (rows_of(DATA / SETS[task]) if task in SETS else drawn_rows(task))
            ]
            for task in tasks
        }

    def to_learn(self, task: str, number: int) -> str:
        """Choose the prompt of a number; after the last one the first comes again."""
        return self._chosen(task, number, 0)

    def to_measure(self, task: str, number: int) -> str:
        """Choose one that ``to_learn`` never does."""
        return self._chosen(task, number, 1)

    def _chosen(self, task: str, number: int, half: int) -> str:
        texts = self._texts[task][half::2]
        return texts[number % len(texts)]
