"""The words of scaling: demand, targets, and what a fleet of a shape is predicted to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scaling import FleetShape


@dataclass(frozen=True)
class RecentDemand:
    """Requests that arrived within a window, in the order of their arrival.

    Attributes:
        at_s: float64 ``[n]``, seconds since the window began.
        prompt_tokens: int64 ``[n]``, to be computed: without those that a prefix cache has.
        answer_tokens: int64 ``[n]``; 1 for requests that are only scored.
        window_s: length of the window.
    """

    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    answer_tokens: NDArray[np.int64]
    window_s: float

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.at_s)

    @property
    def requests_per_s(self) -> float:
        """Mean rate of arrivals."""
        return len(self) / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True)
class Objectives:
    """Targets of latency, and the part of the requests that shall meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9


@dataclass(frozen=True)
class StepRows:
    """The rows of one forward pass of one attention worker.

    Attributes:
        prompt_rows: tokens of prompts.
        answer_rows: generations that get a token.
        keys: keys that all these rows see together.
    """

    prompt_rows: float
    answer_rows: float
    keys: float

    @property
    def rows(self) -> float:
        """Rows of both phases."""
        return self.prompt_rows + self.answer_rows


@dataclass(frozen=True)
class StepTime:
    """Seconds of one forward pass, and how long it keeps each side busy.

    Attributes:
        seconds: from its begin to its end, waiting for expert workers included.
        attention_s: of it, an attention worker computes.
        experts_s: an expert worker computes, the one that has most to do.
        error_s: one standard error.
    """

    seconds: float
    attention_s: float
    experts_s: float
    error_s: float = 0.0


class StepTimes(Protocol):
    """Seconds of steps of a fleet of one shape."""

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """Predict one step of one attention worker, the others having alike steps at the same time."""
        ...


@dataclass(frozen=True)
class ServingLimits:
    """Limits of an attention worker, as ``EngineLimits`` has them.

    Attributes:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: rows in one step.
        kv_tokens: tokens that its KV blocks hold.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 1 << 20


@dataclass(frozen=True)
class ShapeBounds:
    """Shapes that a fleet may have."""

    least: FleetShape
    most: FleetShape

    def shapes(self) -> Sequence[FleetShape]:
        """All of them, in the order of attention and then of expert workers."""
        return [
            FleetShape(attention, experts)
            for attention in range(self.least.attention, self.most.attention + 1)
            for experts in range(self.least.experts, self.most.experts + 1)
        ]
