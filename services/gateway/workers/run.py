"""One run of a request: a prompt, its attempts as tasks for workers, and the progress over all of them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moesaic.errors import DeadlineExceeded, MoesaicError, PeerLost
from moesaic.services.gateway import metrics
from moesaic.v1.attention_pb2 import (
    Degradation,
    Embedding,
    Failure,
    Finished,
    Generation,
    Pooled,
    PromptLogprobs,
    Scores,
    Scoring,
    Submit,
    TokenLogprob,
    Tokens,
)

Event = PromptLogprobs | Tokens | Scores | Pooled | Finished | Failure | MoesaicError
Work = Generation | Scoring | Embedding
Key = tuple[str, int]  # worker id and generation: a restarted worker is another one


class TaskSpans(Protocol):
    """Spans of a task; see ``attempt_spans``."""

    def routed(self, key: Key, why: Mapping[str, str | int]) -> None:
        """Note that a worker is about to get the task, and why that one."""
        ...

    def end(self, code: str = "", *, cancelled: bool = False) -> None:
        """Note the end, by an error with a ``code`` if there is one; later calls do nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Task:
    """One attempt of one sequence, as its worker's stream knows it."""

    submit: Submit
    placed: Callable[[Key], None]  # called once, when a worker is about to get it
    deliver: Callable[[Event], None]
    spans: "TaskSpans | None" = None  # of a request that is traced

    @property
    def key(self) -> tuple[str, int]:
        """Name of the task in events."""
        return self.submit.request_id, self.submit.attempt


@dataclass(frozen=True)
class Deadline:
    """End of a request's time, on the event loop's clock."""

    budget_ms: float
    at: float

    @classmethod
    def after(cls, budget_ms: float) -> "Deadline":
        """Set the end ``budget_ms`` from now."""
        return cls(budget_ms, asyncio.get_running_loop().time() + budget_ms / 1000)

    def remaining_ms(self) -> int:
        """Count the milliseconds that are left, at least 1: 0 would mean no deadline."""
        return max(1, round((self.at - asyncio.get_running_loop().time()) * 1000))

    def exceeded(self) -> DeadlineExceeded:
        """Make the error to raise when it has passed."""
        return DeadlineExceeded.of_request(self.budget_ms)


@dataclass(frozen=True)
class RequestTerms:
    """Treatment of a request's runs beside others."""

    priority: int = 0  # less goes first; below 0, before the tenant's own requests only
    tenant: str = ""  # the owner of the turns that they use up
    cache_salt: str = ""  # only requests with the same one share computed prefixes
    min_threshold: float = 0.0  # share of choices whose own experts serve, at least; 1: exact
    store_kv: bool | None = None  # of prompts that are only read; None: as workers do by default
    site: str = ""  # whose workers go first; empty: any


@dataclass(eq=False)
class Run:
    """One prompt with the work on it, and the progress of that."""

    prompt: Sequence[int]
    work: Work
    terms: RequestTerms = field(default_factory=RequestTerms)
    family: int | None = None  # runs of one family share their prefix, so they go to one worker
    max_tokens: int = 0  # of an answer; all runs of a request share the rest of the work
    seed: int = 0  # of an answer
    token_ids: list[int] = field(default_factory=list)  # of the answer, so far
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    done: bool = False
    attempt: int = 0
    start: int = 0  # tokens there were when this attempt began
    blame: float = 0.0  # its part in the losses since its last token
    pauses: int = 0  # attempts that were lost to no fault of its own
    tried: set[Key] = field(default_factory=set)
    loss: MoesaicError | None = None  # that ended the last attempt
    worker_ids: list[str] = field(default_factory=list)  # of all attempts
    under_way: Task | None = None
    placed_at: Key | None = None  # of this attempt; None while it waits for a worker
    excluded: set[Key] = field(default_factory=set)  # from this attempt
    parts: dict[int, Degradation | None] = field(default_factory=dict)
    """By attempt that gave a part of the answer: what its worker told of its work; None: nothing."""

    def submit(self, request_id: str, deadline_ms: int) -> Submit:
        """Make the command for the next attempt: the prompt, continued from the tokens so far."""
        self.attempt += 1
        self.start = len(self.token_ids)
        submit = Submit(
            request_id=request_id,
            attempt=self.attempt,
            token_ids=[*self.prompt, *self.token_ids],
            deadline_ms=deadline_ms,
            priority=self.terms.priority,
            cache_salt=self.terms.cache_salt,
            min_threshold=self.terms.min_threshold,
            tenant=self.terms.tenant,
            part_of=request_id.rpartition("-")[0],
        )
        if not isinstance(self.work, Generation):
            is_scoring = isinstance(self.work, Scoring)
            read: Scoring | Embedding = submit.scoring if is_scoring else submit.embedding
            read.MergeFrom(self.work)  # type: ignore[arg-type]  # of the same kind
            if self.terms.store_kv is not None:
                read.store_kv = self.terms.store_kv
        else:
            submit.generation.CopyFrom(self.work)
            submit.generation.max_tokens = self.max_tokens - self.start
            submit.generation.sampling.seed = self.seed
            submit.generation.min_tokens = max(0, self.work.min_tokens - self.start)
            submit.generation.num_resumed_tokens = self.start
            # What is known of the prompt came before the first token.
            if self.start:
                submit.generation.ClearField("prompt_logprobs")
        return submit

    @property
    def size(self) -> int:
        """Token ids and the like that a command for it holds: how long it takes to make one."""
        return len(self.prompt) + len(self.token_ids) + _size_of(self.work)

    @property
    def is_full(self) -> bool:
        """True if a generation has all its tokens, and the log-probabilities of its prompt if it wants them."""
        if not isinstance(self.work, Generation) or len(self.token_ids) < self.max_tokens:
            return False
        wants_prompt = self.work.HasField("prompt_logprobs")
        return not wants_prompt or len(self.prompt_logprobs) == len(self.prompt) - 1

    def add_tokens(self, event: Tokens) -> Tokens | None:
        """Take tokens of the answer.

        Returns:
            Those that are new; None if all came before.

        Raises:
            PeerLost: some are missing before them.
        """
        # Of this attempt
        known = len(self.token_ids) - self.start
        if event.token_index > known:
            raise _gap(known, event.token_index)
        self._note_part(event)
        if repeated := min(known - event.token_index, len(event.token_ids)):
            metrics.duplicates.inc(repeated)
            event = Tokens(
                token_index=known,
                token_ids=event.token_ids[repeated:],
                logprobs=event.logprobs[repeated:],
            )
        self.token_ids.extend(event.token_ids)
        return event if event.token_ids else None

    def add_prompt_logprobs(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Take log-probabilities of the prompt; another attempt begins them again.

        Returns:
            The event if any of them is new, else None.

        Raises:
            PeerLost: some are missing before them.
        """
        known = len(self.prompt_logprobs)
        if event.first_position > known + 1:
            raise _gap(known + 1, event.first_position)
        self._note_part(event)
        fresh = event.logprobs[known + 1 - event.first_position :]
        self.prompt_logprobs.extend(fresh)
        return event if fresh else None

    def finish(self, event: Finished) -> None:
        """Take the last word of the worker, or of the gateway in its place."""
        self._note_part(event)

    def _note_part(self, event: Tokens | PromptLogprobs | Finished) -> None:
        part = self.parts.setdefault(self.attempt, None)
        if event.HasField("degradation"):
            self.parts[self.attempt] = event.degradation
        elif part is not None and isinstance(event, Tokens):
            # As exact as the tokens before.
            part.rows += len(event.token_ids)


def _size_of(work: Work) -> int:
    if isinstance(work, Embedding):
        return 0
    if isinstance(work, Scoring):
        return sum(len(candidate.token_ids) for candidate in work.candidates)
    sampling = work.sampling
    named = len(sampling.allowed_token_ids) + len(sampling.logit_bias) + len(work.stop_token_ids)
    return named + sum(len(word.token_ids) for word in sampling.bad_words)


def _gap(expected: int, came: int) -> PeerLost:
    return PeerLost("an attention worker", f"token {expected} expected, {came} came")


class WorkFailed(MoesaicError):
    """A worker answered with a failure; the fields are the worker's."""

    def __init__(self, failure: Failure) -> None:
        self.code = failure.code or "internal_error"  # type: ignore[misc]  # of this one failure
        self.http_status = failure.http_status or 500  # type: ignore[misc]  # of this one failure
        self.retryable = failure.retryable  # type: ignore[misc]  # of this one failure
        self.retry_after_s = failure.retry_after_s or None
        self.field = failure.field or None
        super().__init__(failure.message)


class WorkerLost(PeerLost):
    """An attention worker was lost, with all runs that it had.

    Attributes:
        blame: the part of each of these runs in the loss. It is 0 where the worker was paused or cut off, which no
            run does.
    """

    def __init__(self, cause: str, blame: float) -> None:
        self.blame = blame
        super().__init__("an attention worker", cause)


class SlowClient(MoesaicError):
    """The client reads its stream slower than tokens are made."""

    code = "slow_client"
    http_status = 408

    def __init__(self) -> None:
        super().__init__("the client reads too slowly; its request was cancelled")
