"""The performance model of a fleet: seconds of each part of a step, as data with error bars."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from moesaic.messages.bounds import Count, Name

Part = Literal[
    "step",
    "attention",
    "experts",
    "link.intra",
    "link.inter",
    "route",
    "gather",
    "fetching",
    "head",
]
"""
============== =====================================================================================
``step``       one step of a worker, its experts included, from the end of the one before
``attention``  the same without experts and what is waited for because of them
``experts``    one layer of one batch on one worker
``link.intra`` one exchange over links inside a node
``link.inter`` the same between nodes
``route``      all exchanges of one step whose rows go to expert workers
``gather``     all experts of one step, where experts are brought to its rows
``fetching``   one transfer of experts
``head``       logits
============== =====================================================================================
"""

PART_TERMS: dict[Part, tuple[str, ...]] = {
    "step": ("step", "expert", "prompt_row", "answer_row", "key", "prompt_key"),
    "attention": ("step", "row", "key", "prompt_key"),
    "experts": ("batch", "expert", "row"),
    "link.intra": ("hop", "message", "byte"),
    "link.inter": ("hop", "message", "byte"),
    "route": ("step", "row"),
    "gather": ("step", "row"),
    "fetching": ("transfer", "byte"),
    "head": ("step", "row"),
}
"""Amounts that the seconds of each part grow with. ``key``: a cached one that a generated token sees; a token at
position ``p`` sees ``p + 1``. ``prompt_key``: one that a prompt's token sees, which costs far less, for its neighbours
see the same. ``row`` of ``experts``: one choice, so each token counts ``k`` times. ``expert``: one whose weights are
read; in a ``step`` those of one layer, as if each row chose at random (``moesaic.costs.RandomChoice``)."""

Positive = Annotated[float, msgspec.Meta(ge=0)]


class Estimate(NamedTuple):
    """Predicted seconds. A part that was never measured takes 0 s, with unlimited error."""

    seconds: float
    error_s: float  # one standard error of the mean
    spread_s: float  # one standard deviation of a single measurement, error included


UNKNOWN = Estimate(0.0, math.inf, math.inf)


class PartCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one part: a sum over its terms.

    Attributes:
        terms: see ``PART_TERMS``.
        unit_s: seconds of one unit of each term, none negative.
        covariance: covariance of ``unit_s``, ``[n][n]``.
        spread: standard deviation of a measurement, relative to its prediction.
        samples: number of measurements, older ones counting less; 0: taken from published figures.
    """

    terms: tuple[str, ...]
    unit_s: tuple[Positive, ...]
    covariance: tuple[tuple[float, ...], ...] = ()
    spread: Positive = 0.0
    samples: Positive = 0.0

    def at(self, amounts: Sequence[float]) -> Estimate:
        """Predict the seconds of these amounts of the terms; amounts left out at the end are 0."""
        seconds = self.seconds(*amounts)
        variance = sum(
            each * own * other
            for row, own in zip(self.covariance, amounts, strict=False)
            for each, other in zip(row, amounts, strict=False)
        )
        error_s = math.sqrt(max(0.0, variance))
        return Estimate(seconds, error_s, math.hypot(error_s, self.spread * seconds))

    def seconds(self, *amounts: float) -> float:
        """Predict the seconds alone."""
        return sum(unit_s * amount for unit_s, amount in zip(self.unit_s, amounts, strict=False))


class PerformanceModel(msgspec.Struct, frozen=True, kw_only=True, tag="performance-model.v1"):
    """Costs of the parts that are known.

    Attributes:
        device: name of the device, for people.
        source: place of the measurement or publication.
        parts: costs by ``Part``.
    """

    device: str = ""
    source: str = ""
    parts: dict[str, PartCost] = {}

    def at(self, part: Part, amounts: Sequence[float]) -> Estimate:
        """Predict the seconds of one part; ``UNKNOWN`` if it was never measured."""
        found = self.parts.get(part)
        return UNKNOWN if found is None else found.at(amounts)


class FitSums(msgspec.Struct, frozen=True, kw_only=True):
    """Weighted sums from which a fit is made; sums of several workers give the fit of all of them.

    Attributes:
        products: sums of products of amounts, ``[n][n]``.
        responses: sums of amounts times seconds, ``[n]``.
        squares: sum of squared seconds.
        weight: sum of the weights of measurements; the latest weighs 1.
        squared_weight: sum of the squared weights.
    """

    products: tuple[tuple[float, ...], ...]
    responses: tuple[float, ...]
    squares: float = 0.0
    weight: Positive = 0.0
    squared_weight: Positive = 0.0


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One request that a worker was given."""

    at: float  # seconds since 1970, by the worker's clock
    prompt_tokens: int
    answer_tokens: (
        int  # as of one that ended lately; 1 for requests that are only scored; 0: not known
    )
    cached_tokens: int = (
        0  # of the prompt, that need not be computed, if it is as those that ended lately
    )


class RequestLatency(msgspec.Struct, frozen=True, array_like=True):
    """Latencies of one request that ended."""

    ttft_s: float  # until its first token, or its scores, from the engine's queue on; endless: it failed or was refused
    tpot_s: float = 0.0  # mean of its later tokens; 0 if there are none


MOST_KEPT = 128  # arrivals and latencies of a report; more are counted alone


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag="load-report.v1"):
    """Load and costs of one worker since its report before.

    Attributes:
        window_s: length of the time that this covers.
        worker_id: id of the worker.
        generation: generation of the worker's start.
        role: role of the worker.
        at: seconds since 1970 by the worker's clock.
        waiting: requests that have not begun.
        latencies: latencies of requests that ended, at most ``MOST_KEPT``; ``ended`` counts all.
        ended: requests that ended; cancelled ones are not counted.
        arrivals: requests that arrived, at most ``MOST_KEPT``; ``arrived`` counts all, refused ones too.
        arrived: requests that arrived.
        costs: all known costs by ``Part``, new or not.
    """

    window_s: Positive
    worker_id: Name = ""
    generation: Count = 0
    role: Name = ""
    at: float = 0.0
    waiting: int = 0
    latencies: list[RequestLatency] = []
    ended: int = 0
    arrivals: list[Arrival] = []
    arrived: int = 0
    costs: dict[str, FitSums] = {}

    def and_then(self, later: "LoadReport") -> "LoadReport":
        """Append the next report to this one, as one report."""
        return replace(
            later,
            window_s=self.window_s + later.window_s,
            latencies=(self.latencies + later.latencies)[-MOST_KEPT:],
            ended=self.ended + later.ended,
            arrivals=(self.arrivals + later.arrivals)[-MOST_KEPT:],
            arrived=self.arrived + later.arrived,
        )
