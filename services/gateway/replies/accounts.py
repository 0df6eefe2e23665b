"""Accounts of a request that every answer carries: the tokens it took, and their origin."""

from collections.abc import Iterable, Sequence

import msgspec

from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Finished


class Usage(msgspec.Struct):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Sum up tokens, with their total."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, {"cached_tokens": cached_tokens})


class EpochTokens(msgspec.Struct):
    """Tokens computed under one placement."""

    epoch: int
    tokens: int


class Quality(msgspec.Struct):
    """The effect of brownout on an answer.

    Attributes:
        mean_threshold: share of choices whose own experts were to serve, mean over its rows; 1: nothing was degraded.
        degraded_share: of the choices of experts, over rows and layers, that others or nobody served.
    """

    mean_threshold: float
    degraded_share: float


class Provenance(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The ``moesaic`` object of an answer.

    Attributes:
        epochs: tokens under each placement. A worker tells them when it finishes: an answer that a stop string cut
            short is not among them, and the field is absent when nothing is known.
        cached_tokens: prompt tokens that workers had already, likewise as far as they told.
        quality: absent when it is not known of all: where a stop string cut an answer short, or a worker was lost
            and another went on.
        workers: who computed it, if asked for.
        prompt_version: of the words that questions were put in; with others the numbers would differ.
    """

    epochs: list[EpochTokens] = []
    cached_tokens: int
    quality: Quality | None = None
    workers: list[str] | None = None
    prompt_version: str | None = None


def provenance_of(
    finished: Iterable[Finished], runs: Iterable[Run], cached_tokens: int, names_workers: bool
) -> Provenance:
    """Sum up what workers told at the end of their runs.

    Args:
        finished: the last events of those runs that have one.
        runs: all runs of the request.
        cached_tokens: prompt tokens that workers had already.
        names_workers: the caller wants to know the workers.
    """
    tokens: dict[int, int] = {}
    finished, runs = list(finished), list(runs)
    for done in finished:
        for span in done.epochs:
            tokens[span.epoch] = tokens.get(span.epoch, 0) + span.tokens
    workers = sorted({worker_id for run in runs for worker_id in run.worker_ids})
    return Provenance(
        epochs=[EpochTokens(epoch, count) for epoch, count in sorted(tokens.items())],
        cached_tokens=cached_tokens,
        quality=_quality_of(finished) if _told_all(finished, runs) else None,
        workers=workers if names_workers else None,
    )


def _told_all(finished: Sequence[Finished], runs: Sequence[Run]) -> bool:
    """True if of all runs the worker has told that computed them, each of them alone."""
    told = all(done.HasField("degradation") for done in finished)
    return told and 0 < len(finished) == len(runs) and not any(run.interrupted for run in runs)


def _quality_of(finished: Sequence[Finished]) -> Quality:
    """Weigh the runs of a request by their rows."""
    thresholds = degraded = 0.0
    for done in finished:
        told = done.degradation
        thresholds += told.rows * told.mean_threshold
        degraded += told.rows * told.share
    total = sum(done.degradation.rows for done in finished)
    if not total:
        return Quality(1.0, 0.0)  # all of it was computed before
    return Quality(round(thresholds / total, 4), round(degraded / total, 4))
