"""One REST request on the attention workers: each of its runs ends exactly once, whoever is lost meanwhile."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import structlog

from moesaic.errors import DeadlineExceeded, MoesaicError, NotReady, PeerLost
from moesaic.v1.attention_pb2 import (
    FINISH_REASON_LENGTH,
    Failure,
    Finished,
    Generation,
    PromptLogprobs,
    Scores,
    Scoring,
    Submit,
    TokenLogprob,
    Tokens,
)
from services.gateway import metrics
from services.gateway.places import Places
from services.gateway.tasks import Event, Key, Task
from services.gateway.workers import Workers

log = structlog.get_logger()

WINDOW = 64  # sequences of one request that are under way at a time
MAX_BUFFERED = 8192  # events that may wait for a slow client
News = PromptLogprobs | Tokens | Scores | Finished  # what a run brings
MAX_ATTEMPTS = 8  # of one sequence: what it brings down eight times is its own doing
_TRY_ELSEWHERE = {"worker_lost", "draining", "not_ready", "overloaded"}


_NO_HOME = ("", 0)


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


@dataclass(frozen=True)
class Terms:
    """How the runs of a request are to be treated beside others."""

    priority: int = 0  # less goes first; below 0, before the tenant's own requests only
    tenant: str = ""  # whose turn they use up
    cache_salt: str = ""  # only requests with the same one share computed prefixes
    exact: bool = False  # nothing that was computed in a degraded way may be used
    store_kv: bool | None = None  # of what is only scored; None: as workers do by default


@dataclass(eq=False)
class Run:
    """One prompt with what is to be made of it, and how far that is."""

    prompt: Sequence[int]
    work: Generation | Scoring
    terms: Terms = field(default_factory=Terms)
    family: int | None = None  # runs of one family share their prefix, so they go to one worker
    token_ids: list[int] = field(default_factory=list)  # of the answer, so far
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    done: bool = False
    attempt: int = 0
    start: int = 0  # tokens there were when this attempt began
    fruitless: int = 0  # losses in a row that brought nothing
    tried: set[Key] = field(default_factory=set)
    loss: MoesaicError | None = None  # that ended the last attempt
    worker_ids: list[str] = field(default_factory=list)  # of all attempts
    under_way: Task | None = None
    placed_at: Key | None = None  # of this attempt; None while it waits for a worker
    excluded: set[Key] = field(default_factory=set)  # from this attempt

    def submit(self, request_id: str, deadline_ms: int) -> Submit:
        """The command for the next attempt: the prompt, continued from the tokens there are."""
        self.attempt += 1
        self.start = len(self.token_ids)
        submit = Submit(
            request_id=request_id,
            attempt=self.attempt,
            token_ids=[*self.prompt, *self.token_ids],
            deadline_ms=deadline_ms,
            priority=self.terms.priority,
            cache_salt=self.terms.cache_salt,
            exact=self.terms.exact,
            tenant=self.terms.tenant,
            part_of=request_id.rpartition("-")[0],
        )
        if isinstance(self.work, Scoring):
            submit.scoring.CopyFrom(self.work)
            if self.terms.store_kv is not None:
                submit.scoring.store_kv = self.terms.store_kv
        else:
            submit.generation.CopyFrom(self.work)
            submit.generation.max_tokens -= self.start
            submit.generation.min_tokens = max(0, self.work.min_tokens - self.start)
            submit.generation.num_resumed_tokens = self.start
            if self.start:  # what is known of the prompt came before the first token
                submit.generation.ClearField("prompt_logprobs")
        return submit

    @property
    def is_full(self) -> bool:
        """Whether a generation has all it may have."""
        if isinstance(self.work, Scoring) or len(self.token_ids) < self.work.max_tokens:
            return False
        wants_prompt = self.work.HasField("prompt_logprobs")
        return not wants_prompt or len(self.prompt_logprobs) == len(self.prompt) - 1


class Execution:
    """Carries out the runs of one request; leaving the block cancels what is still under way."""

    def __init__(
        self,
        workers: Workers,
        request_id: str,
        runs: Sequence[Run],
        deadline: Deadline,
        places: Places | None = None,
    ) -> None:
        """``places`` bound what is computed at once, of this request and others."""
        self.runs = runs
        self._places = places or Places()
        self._workers, self._request_id, self._deadline = workers, request_id, deadline
        self._waiting = deque(range(len(runs)))
        self._num_open = len(runs)
        self._events: deque[tuple[int, int, Event]] = deque()  # run, attempt, event
        self._arrived = asyncio.Event()
        self._aborted: MoesaicError | None = None
        # Of each family that has begun, the worker that got the last of it; None while its first waits for one.
        self._homes: dict[int | None, Key | None] = {}

    async def __aenter__(self) -> "Execution":
        loop = asyncio.get_running_loop()
        self._expiring = loop.call_at(self._deadline.at, self._expire)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._expiring.cancel()
        for run in self.runs:
            self.cancel(run)
        self._places.leave(self)

    def _expire(self) -> None:
        if self._aborted is None:
            self.abort(self._deadline.exceeded())

    def abort(self, error: MoesaicError) -> None:
        """Make the request fail at its next step."""
        self._aborted = error
        self._arrived.set()

    def cancel(self, run: Run) -> None:
        """End a run: its worker stops, and no more events of it come."""
        if not run.done:
            self._end(run)
            self._hang_up(run)

    def wake(self) -> None:
        """There may be a place for what waits."""
        self._arrived.set()

    def _end(self, run: Run) -> None:
        run.done = True
        self._num_open -= 1
        if run.attempt:  # it has begun
            self._places.give_back(self)

    async def next_events(self) -> list[tuple[int, News]]:
        """Wait for events and give all there are, each with its run's index; none when all runs have ended.

        Raises:
            MoesaicError: the request cannot be completed.
        """
        while self._num_open:
            self._fill_window()
            await self._wait()
            accepted = []
            while self._events:
                idx, attempt, event = self._events.popleft()
                run = self.runs[idx]
                if run.done or attempt != run.attempt:
                    continue
                if (wanted := self._accept(idx, run, event)) is not None:
                    accepted.append((idx, wanted))
            if accepted:
                return accepted
        return []

    async def _wait(self) -> None:
        if not self._events and self._aborted is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._aborted is not None:
            raise self._aborted

    def _fill_window(self) -> None:
        under_way = self._num_open - len(self._waiting)
        while self._waiting and under_way < WINDOW:
            if self._homes.get(self.runs[self._waiting[0]].family, _NO_HOME) is None:
                return  # siblings go where the first of them goes
            if not self._places.take(self):
                return
            self._start(self._waiting.popleft())
            under_way += 1

    def _start(self, idx: int) -> None:
        """Have the next attempt of a run placed.

        Raises:
            NotReady: no worker can take it, and none has been there for long.
            Overloaded: too many wait.
        """
        run = self.runs[idx]
        submit = run.submit(f"{self._request_id}-{idx}", self._deadline.remaining_ms())
        attempt = run.attempt

        def placed(key: Key) -> None:
            run.placed_at = key
            run.worker_ids.append(key[0])
            if run.family is not None:
                self._homes[run.family] = key
                self._arrived.set()  # its siblings may follow it now
            submit.deadline_ms = self._deadline.remaining_ms()  # less what it waited

        run.placed_at = None
        run.under_way = Task(submit, placed, lambda event: self._deliver(idx, attempt, event))
        if run.family is not None:
            self._homes.setdefault(run.family, None)
        run.excluded = self._out_of_question(run)
        self._workers.submit(run.under_way, run.excluded)

    def _out_of_question(self, run: Run) -> set[Key]:
        """The workers that may not get a run: those tried before, unless there is no other, and for siblings all but
        the one that has the others, as long as that takes work."""
        accepting = self._accepting
        home = self._homes.get(run.family)
        if home in accepting - run.tried:
            return run.tried | (accepting - {home})
        return run.tried.copy() if accepting - run.tried else set()

    @property
    def _accepting(self) -> set[Key]:
        return {worker.key for worker in self._workers.accepting}

    def _deliver(self, idx: int, attempt: int, event: Event) -> None:
        if len(self._events) >= MAX_BUFFERED:
            self._aborted = self._aborted or SlowClient()
        else:
            self._events.append((idx, attempt, event))
        self._arrived.set()

    def _accept(self, idx: int, run: Run, event: Event) -> News | None:
        """What of an event is news; a loss sets the run going elsewhere."""
        if isinstance(event, Tokens):
            return self._accept_tokens(idx, run, event)
        if isinstance(event, PromptLogprobs):
            return self._accept_prompt(idx, run, event)
        if isinstance(event, Finished):
            self._end(run)
            return event
        if isinstance(event, Scores):
            return event
        error = WorkFailed(event) if isinstance(event, Failure) else event
        if isinstance(error, NotReady) and run.placed_at is None:
            if not run.excluded:  # nobody has come
                raise run.loss or error
            self._start(idx)  # those that it waited for have gone: others will do
            return None
        if error.code not in _TRY_ELSEWHERE or run.placed_at is None:
            raise error
        return self._try_elsewhere(idx, run, error)

    def _accept_prompt(
        self, idx: int, run: Run, event: PromptLogprobs
    ) -> PromptLogprobs | Finished | None:
        known = len(run.prompt_logprobs)
        if event.first_position > known + 1:
            return self._on_gap(idx, run, known + 1, event.first_position)
        fresh = event.logprobs[known + 1 - event.first_position :]  # another attempt begins again
        run.prompt_logprobs.extend(fresh)
        return event if fresh else None

    def _accept_tokens(self, idx: int, run: Run, event: Tokens) -> Tokens | Finished | None:
        known = len(run.token_ids) - run.start  # of this attempt
        if event.token_index > known:
            return self._on_gap(idx, run, known, event.token_index)
        if repeated := min(known - event.token_index, len(event.token_ids)):
            metrics.duplicates.inc(repeated)
            event = Tokens(
                token_index=known,
                token_ids=event.token_ids[repeated:],
                logprobs=event.logprobs[repeated:],
            )
        run.token_ids.extend(event.token_ids)
        return event if event.token_ids else None

    def _on_gap(self, idx: int, run: Run, expected: int, came: int) -> Finished | None:
        self._hang_up(run)
        gap = f"token {expected} expected, {came} came"
        return self._try_elsewhere(idx, run, PeerLost("an attention worker", gap))

    def _try_elsewhere(self, idx: int, run: Run, cause: MoesaicError) -> Finished | None:
        """Go on from the tokens there are, on another worker or on whoever comes back: sampling is by seed and
        position, so nothing changes."""
        if run.is_full:  # only the worker's last word was lost
            self._end(run)
            return Finished(reason=FINISH_REASON_LENGTH, prompt_tokens=len(run.prompt))
        assert run.placed_at is not None  # or nothing could come back that is tried elsewhere
        run.tried.add(run.placed_at)
        run.loss = cause
        run.fruitless = 1 if len(run.token_ids) > run.start else run.fruitless + 1
        refused = not isinstance(cause, PeerLost) and not self._accepting - run.tried
        if run.fruitless > 1 or run.attempt >= MAX_ATTEMPTS or (refused and self._accepting):
            raise cause
        try:
            self._start(idx)
        except MoesaicError:
            raise cause from None
        metrics.reruns.labels(cause.code).inc()
        log.warning("request.rerun", cause=cause.code, sequence=idx, tokens=len(run.token_ids))
        return None

    def _hang_up(self, run: Run) -> None:
        if run.under_way is not None:
            self._workers.cancel(run.under_way)
