"""Accounts of a request that every answer carries: the tokens it took, and their origin."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Degradation, Finished

_LEAST = 0.0001  # that is told of a share


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


class InputDetails(msgspec.Struct):
    """Input tokens that need not be computed, and those kept for later, which nobody pays for here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens that were not given."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens that a response took, or questions, for which none are generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def response_usage(usage: Usage) -> ResponseUsage:
    """Write a chat's usage as responses have it."""
    details = usage.completion_tokens_details or {}
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details["cached_tokens"]),
        usage.completion_tokens,
        OutputDetails(details.get("reasoning_tokens", 0)),
        usage.total_tokens,
    )


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
        quality: of all parts of the answer, those of lost workers included; absent if a worker does not tell it and
            nothing else of the answer was degraded.
        workers: who computed it, if asked for.
        prompt_version: of the words that questions were put in; with others the numbers would differ.
    """

    epochs: list[EpochTokens] = []
    cached_tokens: int
    quality: Quality | None = None
    workers: list[str] | None = None
    prompt_version: str | None = None


class ListReply(msgspec.Struct, kw_only=True):
    """Fields of the answers that are lists: one result for each text, pair or item."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Any]
    usage: Usage
    moesaic: Provenance


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
        quality=_quality_of([part for run in runs for part in run.parts.values()]),
        workers=workers if names_workers else None,
    )


def _quality_of(parts: Sequence[Degradation | None]) -> Quality | None:
    """Weigh the parts of an answer by their rows; None if it is not known whether any was degraded."""
    told = [part for part in parts if part is not None]
    is_degraded = any(part.mean_threshold < 1 or part.share for part in told)
    if len(told) < max(1, len(parts)) and not is_degraded:
        return None
    total = sum(part.rows for part in told)
    if not total:
        # All of it was computed before.
        return Quality(1.0, 0.0)
    not_promised = sum(part.rows * (1 - part.mean_threshold) for part in told) / total
    degraded = sum(part.rows * part.share for part in told) / total
    return Quality(round(1 - _rounded(not_promised), 4), _rounded(degraded))


def _rounded(share: float) -> float:
    """Round to four digits, but never a little to nothing."""
    return round(share, 4) or (_LEAST if share > 0 else 0.0)
