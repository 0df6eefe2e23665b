"""One REST request on the attention workers: its sequences, each carried out exactly once, whoever is lost meanwhile."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import structlog

from moesaic.errors import DeadlineExceeded, MoesaicError, NotReady, PeerLost
from moesaic.v1.attention_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Failure,
    Finished,
    Generation,
    Scores,
    Scoring,
    Submit,
    Tokens,
)
from services.gateway import metrics
from services.gateway.workers import Event, Key, Task, Worker, Workers

log = structlog.get_logger()

WINDOW = 64  # sequences of one request that are under way at a time
MAX_BUFFERED = 8192  # events that may wait for a slow client
_TRY_ELSEWHERE = {"worker_lost", "draining", "not_ready", "overloaded"}


class WorkFailed(MoesaicError):
    """A worker answered with a failure; the fields are the worker's."""

    def __init__(self, failure: Failure) -> None:
        self.code = failure.code or "internal_error"  # type: ignore[misc]
        self.http_status = failure.http_status or 500  # type: ignore[misc]
        self.retryable = failure.retryable  # type: ignore[misc]
        self.retry_after_s = failure.retry_after_s or None
        self.field = failure.field or None
        super().__init__(failure.message)


class SlowClient(MoesaicError):
    """The client reads its stream slower than tokens are made."""

    code = "slow_client"
    http_status = 408

    def __init__(self) -> None:
        super().__init__("the client reads too slowly; its request was cancelled")


@dataclass(frozen=True)
class Deadline:
    """When a request's time is over, on the event loop's clock."""

    budget_ms: float
    at: float

    @classmethod
    def after(cls, budget_ms: float) -> "Deadline":
        """``budget_ms`` from now."""
        return cls(budget_ms, asyncio.get_running_loop().time() + budget_ms / 1000)

    def remaining_ms(self) -> int:
        """What is left, at least 1: 0 would mean no deadline."""
        return max(1, round((self.at - asyncio.get_running_loop().time()) * 1000))

    def exceeded(self) -> DeadlineExceeded:
        """The error to raise when it has passed."""
        return DeadlineExceeded("the request", self.budget_ms)


@dataclass
class Sequence_:
    """One prompt with what is to be made of it, and how far that is."""

    prompt: Sequence[int]
    work: Generation | Scoring
    end_token_ids: frozenset[int] = frozenset()  # tokens that end a generation
    token_ids: list[int] = field(default_factory=list)  # of the answer, so far
    attempt: int = 0
    done: bool = False
    worker: Worker | None = None
    task: Task | None = None
    workers: list[str] = field(default_factory=list)  # ids of all that worked on it
    tried: set[Key] = field(default_factory=set)
    base: int = 0  # tokens there were when this attempt began
    fruitless: int = 0  # attempts in a row that brought nothing
