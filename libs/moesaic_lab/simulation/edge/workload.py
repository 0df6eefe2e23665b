"""Workloads of edge servers: which request comes when to which site."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.placement.traffic.statistics import Floats
from moesaic_lab.simulation.edge.routing import ANSWERS, PROMPTS, Ints, TaskRouting

Mix = Literal["specialised", "mixed"]


@dataclass(frozen=True)
class EdgeWorkload:
    """Requests of all sites, in the order of their arrival.

    Attributes:
        at_s: float64 ``[n]``, ascending.
        site: int32 ``[n]``.
        prompt: int32 ``[n]``, the pass of its prompt.
        answers: int32 ``[n]``, passes after it.
        pool: int32 ``[n]``, the first of the ``ANSWERS // 2`` passes that its answers are taken from.
        start: int32 ``[n]``, which of these comes first.
    """

    at_s: Floats
    site: Ints
    prompt: Ints
    answers: Ints
    pool: Ints
    start: Ints

    @classmethod
    def poisson(
        cls,
        routing: TaskRouting,
        mixes: Sequence[Sequence[int]],
        mean_gap_s: float,
        duration_s: float,
        *,
        answers: int,
        seed: int = 0,
    ) -> Self:
        """Draw a Poisson process at every site.

        Args:
            routing: passes of the tasks.
            mixes: tasks of each site's users, all as likely.
            mean_gap_s: between requests of one site.
            duration_s: none comes later than this.
            answers: passes after the prompt.
            seed: the same draws the same.

        Raises:
            InvalidInput: a number is not above 0.
        """
        if not mean_gap_s > 0 or not duration_s > 0:
            raise InvalidInput("arrivals", f"must be gaps above 0 s, got {mean_gap_s:g}")
        random = np.random.default_rng([seed, 1])
        most = duration_s / mean_gap_s
        gaps = random.exponential(mean_gap_s, (len(mixes), int(most + 8 * np.sqrt(most)) + 16))
        times = gaps.cumsum(axis=1)
        site, nth = np.nonzero(times < duration_s)
        at_s = times[site, nth]
        order = np.lexsort((site, at_s))
        site, at_s = site[order], at_s[order]
        sizes = np.array([len(mix) for mix in mixes])
        table = np.zeros((len(mixes), sizes.max()), np.int64)
        for n, mix in enumerate(mixes):
            table[n, : len(mix)] = mix
        task = table[site, random.integers(0, sizes[site])]
        prompt = routing.first_prompt(task) + random.integers(
            PROMPTS - PROMPTS // 2, size=len(site)
        )
        return cls(
            at_s,
            site.astype(np.int32),
            prompt.astype(np.int32),
            np.full(len(site), answers, np.int32),
            routing.first_answer(task).astype(np.int32),
            random.integers(ANSWERS // 2, size=len(site)).astype(np.int32),
        )

    def __len__(self) -> int:
        return len(self.at_s)


def mixes_of(mix: Mix, num_sites: int, num_tasks: int) -> list[tuple[int, ...]]:
    """Give every site its users' tasks: one each in turn, or all of them."""
    if mix == "mixed":
        return [tuple(range(num_tasks))] * num_sites
    return [(n % num_tasks,) for n in range(num_sites)]


def demand_of(
    routing: TaskRouting, mixes: Sequence[Sequence[int]], mean_gap_s: float, answers: int
) -> NDArray[np.float64]:
    """Expect choices a second of every site, by what placements may learn from: float64 ``[N, L, E]``."""
    tasks = np.stack([routing.learned(task, answers) for task in range(len(routing.tasks))])
    alike: dict[tuple[int, ...], Floats] = {}
    for mix in mixes:
        if tuple(mix) not in alike:
            alike[tuple(mix)] = tasks[list(mix)].mean(axis=0) / mean_gap_s
    return np.stack([alike[tuple(mix)] for mix in mixes])
