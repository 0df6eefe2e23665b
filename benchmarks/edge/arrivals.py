"""Arrivals: Poisson at every server, drawn once, so that every policy meets the same ones."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EdgeArrival:
    """One request that is going to come.

    Attributes:
        number: among those of its task.
        site: index of the server whose users ask.
        task: by name.
        due_s: from the start.
    """

    number: int
    site: int
    task: str
    due_s: float


@dataclass(frozen=True)
class TaskStretch:
    """Seconds in which servers' users have the same tasks.

    Attributes:
        duration_s: length of the stretch.
        tasks_by_site: tasks of each server's users; one is drawn for each request.
    """

    duration_s: float
    tasks_by_site: tuple[tuple[str, ...], ...]


def poisson(per_s: float, duration_s: float, seed: str) -> list[float]:
    """Draw times of arrival in ``0..duration_s``, whose gaps are exponential with mean ``1 / per_s``."""
    rng, at, found = random.Random(seed), 0.0, list[float]()
    while (at := at + rng.expovariate(per_s)) < duration_s:
        found.append(at)
    return found


def arrivals(stretches: Sequence[TaskStretch], per_s: float, seed: str) -> list[EdgeArrival]:
    """Draw the arrivals of all servers, in the order of time.

    Args:
        stretches: one after the other.
        per_s: rate of each server.
        seed: another one makes other arrivals.
    """
    rng, numbers, found, start_s = random.Random(seed), Counter[str](), list[EdgeArrival](), 0.0
    for n, stretch in enumerate(stretches):
        times = [
            (due_s, site)
            for site in range(len(stretch.tasks_by_site))
            for due_s in poisson(per_s, stretch.duration_s, f"{seed} {n} {site}")
        ]
        for due_s, site in sorted(times):
            task = rng.choice(stretch.tasks_by_site[site])
            found.append(EdgeArrival(numbers[task], site, task, start_s + due_s))
            numbers[task] += 1
        start_s += stretch.duration_s
    return found
