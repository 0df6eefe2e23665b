"""The life of a batch: events in, the next state out. Pure; the caller brings the time."""

from typing import Literal

import msgspec

from moesaic.batch.results import ResultTally

WINDOW_S = {"24h": 24 * 3600}  # the completion windows that can be asked for
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Stop = Literal["expired", "cancelled"]


class LineError(msgspec.Struct, frozen=True):
    """A fault of the input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(msgspec.Struct, frozen=True):
    """The faults of an input."""

    data: list[LineError]
    object: str = "list"


class Counts(msgspec.Struct, frozen=True):
    """Numbers of requests: all, and those with a result."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers together."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as callers see it; times are seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        """True once nothing will change any more."""
        return self.status in ENDED

    def stop_reason(self, now: int) -> Stop | None:
        """Return the reason why requests without an answer get none any more; None while they do."""
        if self.cancelling_at is not None:
            return "cancelled"
        return "expired" if (self.finalizing_at or now) >= self.expires_at else None


class Validated(msgspec.Struct, frozen=True):
    """Every line of the input is a request."""

    total: int


class Rejected(msgspec.Struct, frozen=True):
    """The input cannot be carried out."""

    errors: list[LineError]


class Progressed(msgspec.Struct, frozen=True):
    """This many results are written."""

    tally: ResultTally


class CancelAsked(msgspec.Struct, frozen=True):
    """The caller wants no more answers; ignored once every request has a result."""


class AllWritten(msgspec.Struct, frozen=True):
    """Every request has a result; the files remain to be made."""

    tally: ResultTally


class Finalized(msgspec.Struct, frozen=True):
    """The files are there; None for one that would be empty."""

    output_file_id: str | None
    error_file_id: str | None


Event = Validated | Rejected | Progressed | CancelAsked | AllWritten | Finalized


class Impossible(Exception):
    """An event that cannot happen in the batch's state; a bug of its sender."""


def advance(batch: Batch, event: Event, now: int) -> Batch:
    """Return the batch after an event at the time ``now``.

    Raises:
        Impossible: it cannot happen in this state.
    """
    with_ = msgspec.structs.replace
    match batch.status, event:
        case "validating", Validated(total=total):
            return with_(
                batch,
                status="in_progress",
                in_progress_at=now,
                request_counts=Counts(total=total),
            )
        case "validating", Rejected(errors=errors):
            return with_(batch, status="failed", failed_at=now, errors=LineErrors(errors))
        case "cancelling", Validated(total=total):  # it was cancelled before it was read
            return with_(batch, request_counts=Counts(total=total))
        case "cancelling", Rejected():
            return with_(batch, status="cancelled", cancelled_at=now)
        case (("in_progress" | "cancelling"), Progressed(tally=tally)):
            return _counted(batch, tally)
        case (("validating" | "in_progress"), CancelAsked()):
            return with_(batch, status="cancelling", cancelling_at=now)
        case (("cancelling" | "cancelled" | "finalizing"), CancelAsked()):
            # It is on its way to its end already.
            return batch
        case "in_progress", AllWritten(tally=tally):
            return with_(_counted(batch, tally), status="finalizing", finalizing_at=now)
        case "cancelling", AllWritten(tally=tally):
            return _counted(batch, tally)
        case (("finalizing" | "cancelling"), Finalized()):
            return _ended(batch, event, now)
        case _:
            raise Impossible(
                f"{type(event).__name__} cannot happen to a batch that is {batch.status}"
            )


def _ended(batch: Batch, files: Finalized, now: int) -> Batch:
    with_ = msgspec.structs.replace
    batch = with_(batch, output_file_id=files.output_file_id, error_file_id=files.error_file_id)
    match batch.stop_reason(now):
        case "cancelled":
            return with_(batch, status="cancelled", cancelled_at=now)
        case "expired":
            return with_(batch, status="expired", expired_at=now)
        case None:
            return with_(batch, status="completed", completed_at=now)


def _counted(batch: Batch, tally: ResultTally) -> Batch:
    counts = Counts(batch.request_counts.total, tally.completed, tally.failed)
    if tally.total > counts.total:
        raise Impossible(f"{tally.total} results of {counts.total} requests")
    usage = BatchUsage(
        input_tokens=tally.prompt_tokens,
        input_tokens_details={"cached_tokens": tally.cached_tokens},
        output_tokens=tally.completion_tokens,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=tally.prompt_tokens + tally.completion_tokens,
    )
    return msgspec.structs.replace(batch, request_counts=counts, usage=usage)
