"""Routing of tasks, as passes that are replayed: of which experts how many rows, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.placement.traffic.statistics import Floats
from moesaic.placement.traffic.trace import Trace

PROMPTS, ANSWERS = 32, 256  # passes of each task; the first half is what placements learn from
SPREAD = 0.6  # of the logarithm of a prompt's length
LENGTHS = 8, 1024
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class TaskRouting:
    """Passes of some tasks.

    Of each task there are first ``PROMPTS`` prompts, then ``ANSWERS`` passes of one row.

    Attributes:
        tasks: names.
        num_experts: of each layer, E.
        num_layers: with experts, L.
        top_k: choices of a row in a layer.
        tokens: rows of each pass, int32 ``[P]``.
        offsets: where the entries of pass ``p`` in layer ``l`` begin, at ``p * L + l``; int64 ``[P * L + 1]``.
        experts: of each entry, int32.
        rows: of each entry, int32: choices of that expert.
    """

    tasks: tuple[str, ...]
    num_experts: int
    num_layers: int
    top_k: int
    tokens: Ints
    offsets: NDArray[np.int64]
    experts: Ints
    rows: Ints

    @classmethod
    def of_trace(cls, trace: Trace, mean_prompt: float, seed: int = 0) -> Self:
        """Replay recorded rows: prompts are stretches of a task's prompts, answers its decoded rows.

        Args:
            trace: parts without both prompts and answers are left out.
            mean_prompt: mean tokens of a prompt.
            seed: of the lengths and stretches.

        Raises:
            InvalidInput: no part is left.
        """
        random = np.random.default_rng([seed, 0])
        tasks, passes = list[str](), list[NDArray[Any]]()
        for part in trace.parts:
            prompts = [step.topk_ids for step in trace.selected([part], ["prefill", "mixed"])]
            answers = [step.topk_ids for step in trace.selected([part], ["decode"])]
            if not prompts or not answers:
                continue
            tasks.append(part)
            passes += _stretches(np.concatenate(prompts, axis=1), mean_prompt, random)
            passes += _rows(np.concatenate(answers, axis=1))
        if not tasks:
            raise InvalidInput("trace", "must have parts with prompts and answers")
        return cls._of(tasks, passes, trace.num_experts)

    @classmethod
    def drawn(
        cls,
        num_tasks: int,
        num_layers: int,
        num_experts: int,
        top_k: int,
        *,
        mean_prompt: float,
        skew: float,
        alike: float,
        seed: int = 0,
    ) -> Self:
        """Draw rows whose gate has a random preference for each expert, and noise.

        Args:
            num_tasks: tasks.
            num_layers: L.
            num_experts: E.
            top_k: experts of a row.
            mean_prompt: mean tokens of a prompt.
            skew: standard deviation of preferences, where that of the noise is 1.28 (Gumbel).
            alike: part of the preferences' variance that all tasks share, in ``0..1``.
            seed: the same draws the same.
        """
        random = np.random.default_rng([seed, 0])
        shape = num_layers, 1, num_experts
        shared = random.standard_normal(shape)
        passes = list[NDArray[Any]]()
        for _ in range(num_tasks):
            own = random.standard_normal(shape)
            wanted = skew * (np.sqrt(alike) * shared + np.sqrt(1 - alike) * own)
            for length in (*_lengths(mean_prompt, random), *[1] * ANSWERS):
                gate = wanted + random.gumbel(size=(num_layers, length, num_experts))
                chosen = np.argpartition(-gate, top_k - 1, axis=2)[:, :, :top_k]
                # A copy: the rest is not kept.
                passes.append(chosen.astype(np.int32))
        return cls._of([f"task-{n}" for n in range(num_tasks)], passes, num_experts)

    @classmethod
    def _of(cls, tasks: Sequence[str], passes: Sequence[NDArray[Any]], num_experts: int) -> Self:
        num_layers, _, top_k = passes[0].shape
        layer = np.arange(num_layers)[:, None] * num_experts
        found, rows, sizes = list[Any](), list[Any](), list[Any]()
        for topk_ids in passes:
            places = (topk_ids.reshape(num_layers, -1).astype(np.int64) + layer).ravel()
            counts = np.bincount(places, minlength=num_layers * num_experts)
            at = np.flatnonzero(counts)
            found.append(at % num_experts)
            rows.append(counts[at])
            sizes.append(np.bincount(at // num_experts, minlength=num_layers))
        ends = np.concatenate([[0], np.concatenate(sizes).cumsum()])
        return cls(
            tuple(tasks),
            num_experts,
            num_layers,
            top_k,
            np.array([each.shape[1] for each in passes], np.int32),
            ends.astype(np.int64),
            np.concatenate(found).astype(np.int32),
            np.concatenate(rows).astype(np.int32),
        )

    def first_prompt(self, task: NDArray[np.int64] | int) -> Any:
        """Find the pass of the first prompt to serve, behind those to learn from."""
        return task * (PROMPTS + ANSWERS) + PROMPTS // 2

    def first_answer(self, task: NDArray[np.int64] | int) -> Any:
        """Find the first of the answers to serve; ``ANSWERS // 2`` of them are in a row."""
        return task * (PROMPTS + ANSWERS) + PROMPTS + ANSWERS // 2

    def learned(self, task: int, answers: float) -> Floats:
        """Count the choices of a mean request of one task, by what placements may learn from.

        Args:
            task: its index.
            answers: passes after the prompt.

        Returns:
            float64 ``[L, E]``.
        """
        start = task * (PROMPTS + ANSWERS)
        prompts = self._counted(start, PROMPTS // 2) / (PROMPTS // 2)
        rows = self._counted(start + PROMPTS, ANSWERS // 2) / (ANSWERS // 2)
        return prompts + answers * rows

    def _counted(self, first: int, count: int) -> Floats:
        bounds = self.offsets[first * self.num_layers : (first + count) * self.num_layers + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        layer = np.repeat(np.arange(len(bounds) - 1) % self.num_layers, np.diff(bounds))
        total = np.zeros((self.num_layers, self.num_experts))
        np.add.at(total, (layer, self.experts[entries]), self.rows[entries])
        return total


def _lengths(mean: float, random: np.random.Generator) -> list[int]:
    """Draw the lengths of one task's prompts, log-normal."""
    drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, PROMPTS)
    return [int(each) for each in np.clip(np.rint(drawn), *LENGTHS)]


def _stretches(
    ids: NDArray[Any], mean_prompt: float, random: np.random.Generator
) -> list[NDArray[Any]]:
    """Cut prompts out of a task's rows ``[L, T, k]``, the first half of them out of its first half."""
    half = ids.shape[1] // 2
    found = []
    for n, length in enumerate(_lengths(mean_prompt, random)):
        room = ids[:, :half] if n < PROMPTS // 2 else ids[:, half:]
        at = int(random.integers(room.shape[1])) + np.arange(length)
        found.append(room[:, at % room.shape[1]])
    return found


def _rows(ids: NDArray[Any]) -> list[NDArray[Any]]:
    """Take single rows, evenly over all that there are."""
    at = np.linspace(0, ids.shape[1] - 1, ANSWERS).astype(int)
    return [ids[:, n : n + 1] for n in at.tolist()]
