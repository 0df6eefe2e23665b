"""One REST request on the attention workers: each of its runs ends exactly once, whichever workers are lost.

A request is let in, or refused, before any of its runs is sent: the runs that it sends at first must find room
together. A request that was let in goes on. A full queue may turn one of its runs away later; the run then waits here
and is sent again. If no worker has, or had, any run of the request, the request gives way as a whole.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import structlog

from moesaic.errors import MoesaicError, NotReady, Overloaded, PeerLost
from moesaic.prefix.fleet import Crowd, Room
from moesaic.services.gateway import metrics
from moesaic.services.gateway.access import Places
from moesaic.services.gateway.workers.attempt_spans import AttemptSpans
from moesaic.services.gateway.workers.run import (
    Deadline,
    Event,
    Key,
    Run,
    SlowClient,
    Task,
    WorkerLost,
    WorkFailed,
)
from moesaic.services.gateway.workers.workers import Workers
from moesaic.v1.attention_pb2 import (
    FINISH_REASON_LENGTH,
    Failure,
    Finished,
    Pooled,
    PromptLogprobs,
    Scores,
    Submit,
    Tokens,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger()

WINDOW = 64  # runs of one request that are under way at a time
# Between two tries of a request that has begun, while queues have no room and it has nothing at workers.
PAUSE_S = 0.25
ROUND_TOKENS = (
    1 << 13
)  # of the runs that are started in one round of the loop: as many take some ms
MAX_BUFFERED = 8192  # events that may wait for a slow client
MAX_ATTEMPTS = (
    8  # of one run: eight lost workers are its own doing; those that were paused do not count
)
MOST_BLAME = 2.0  # of one run: workers that it may end without a token, if others still serve
_TRY_ELSEWHERE = {"worker_lost", "draining", "not_ready", "overloaded"}
_NO_HOME = ("", 0)

News = PromptLogprobs | Tokens | Scores | Pooled | Finished  # of a run


def num_sent_at_first(num_runs: int, places: Places) -> int:
    """Count the runs of a request that must find room together: one, if they wait for places of its tenant."""
    return min(num_runs, WINDOW) if places.most is None else 1


class Execution:
    """The runs of one request; leaving the block cancels those that are still under way."""

    def __init__(
        self,
        workers: Workers,
        request_id: str,
        runs: Sequence[Run],
        deadline: Deadline,
        places: Places,
        span: "Span | None" = None,
    ) -> None:
        """Prepare runs; ``places`` bound those that are computed at once, of this request and others.

        ``span`` is that of the request, if it is traced.
        """
        self.runs, self._span = runs, span
        self._places = places
        self._workers, self._request_id, self._deadline = workers, request_id, deadline
        # Lists, as an empty deque holds a block of 64 places. The next run is the last.
        self._waiting = list(reversed(range(len(runs))))
        self._num_open, self._num_under_way, self._window = len(runs), 0, WINDOW
        self._kept: dict[int, int] = {}  # tokens by run, of those that room is kept for
        self._pause: asyncio.TimerHandle | None = None
        self._events: list[tuple[int, int, Event]] = []  # run, attempt, event
        self._arrived = asyncio.Event()
        self._aborted: MoesaicError | None = None
        # Of each family that has begun, the worker that got the last of it; None while its first waits for one.
        self._homes: dict[int | None, Key | None] = {}

    async def __aenter__(self) -> "Execution":
        """Ask for room.

        Raises:
            Overloaded: workers have no room for so many runs, and nobody has to give way to them.
        """
        self._ask_for_room()
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
        if self._pause is not None:
            self._pause.cancel()
        for run in self.runs:
            self.cancel(run)
            # Its callbacks know this execution: nothing may be left that only garbage collection frees.
            run.under_way = None
        for idx in list(self._kept):
            self._give_up_room(idx)
        self._places.leave(self)

    def _ask_for_room(self) -> None:
        if not self.runs:
            return
        first = self.runs[: num_sent_at_first(len(self.runs), self._places)]
        terms, router = first[0].terms, self._workers.routing.router
        wanted = Room(len(first), sum(len(run.prompt) for run in first))
        # A request that waits for places of its tenant is bounded by these, and has had room for one since it came.
        waits = self._places.most is not None
        if not waits and not router.takes(terms.tenant, terms.priority, wanted):
            metrics.rejections.labels("workers_full").inc()
            raise router.refusal()
        for idx in range(len(first)):
            self._keep_room(idx)

    def _keep_room(self, idx: int) -> None:
        """Count a run among those that wait for workers, until it is sent."""
        run = self.runs[idx]
        self._kept[idx] = len(run.prompt) + len(run.token_ids)
        self._crowd.join(run.terms.tenant, run.terms.priority, self._kept[idx])

    def _give_up_room(self, idx: int) -> None:
        if (num_tokens := self._kept.pop(idx, None)) is not None:
            terms = self.runs[idx].terms
            self._crowd.leave(terms.tenant, terms.priority, num_tokens)

    @property
    def _crowd(self) -> Crowd:
        return self._workers.routing.router.fleet.crowd

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
            self._hang_up(run)
            self._end(run)

    def wake(self) -> None:
        """Look again: there may be a place for a run that waits."""
        self._arrived.set()

    def _end(self, run: Run) -> None:
        run.done = True
        self._num_open -= 1
        if run.under_way is not None:
            self._leave_window(run)
            self._window = min(WINDOW, self._window + 1)

    def _leave_window(self, run: Run) -> None:
        run.under_way = None
        self._num_under_way -= 1
        self._places.give_back(self)

    async def next_events(self) -> list[tuple[int, News]]:
        """Wait for events and give all of them, each with its run's index; none when all runs have ended.

        Raises:
            MoesaicError: the request cannot be completed.
        """
        while self._num_open:
            self._fill_window()
            await self._wait()
            accepted = []
            events, self._events = self._events, []
            for idx, attempt, event in events:
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
        num_tokens = 0
        while self._waiting and self._num_under_way < self._window:
            run = self.runs[self._waiting[-1]]
            # It was cancelled
            if run.done:
                self._waiting.pop()
                continue
            if num_tokens >= ROUND_TOKENS:
                asyncio.get_running_loop().call_soon(self.wake)
                return
            if self._homes.get(run.family, _NO_HOME) is None:
                # Siblings go where the first of them goes.
                return
            if not self._places.take(self):
                return
            num_tokens += run.size
            self._num_under_way += 1
            self._start(self._waiting.pop())

    def _start(self, idx: int) -> None:
        """Have the next attempt of a run placed.

        Raises:
            NotReady: no worker can take it, and none has been there for long.
            Overloaded: too many wait, and the request has not begun.
        """
        run = self.runs[idx]
        submit = run.submit(f"{self._request_id}-{idx}", self._deadline.remaining_ms())
        attempt = run.attempt

        def placed(key: Key) -> None:
            run.placed_at = key
            run.worker_ids.append(key[0])
            if run.family is not None:
                self._homes[run.family] = key
                # Its siblings may follow it now.
                self._arrived.set()
            submit.deadline_ms = self._deadline.remaining_ms()  # less what it waited

        run.placed_at = None
        run.under_way = self._task(submit, placed, lambda event: self._deliver(idx, attempt, event))
        if run.family is not None:
            self._homes.setdefault(run.family, None)
        run.excluded = self._out_of_question(run)
        self._give_up_room(idx)
        try:
            self._workers.submit(run.under_way, run.excluded)
        except Overloaded as full:
            if run.under_way.spans is not None:
                run.under_way.spans.end(full.code)
            run.pauses += 1
            self._put_off(idx, full)

    def _task(
        self, submit: Submit, placed: Callable[[Key], None], deliver: Callable[[Event], None]
    ) -> Task:
        if self._span is None:
            return Task(submit, placed, deliver)
        traced = AttemptSpans(self._span, submit)
        return Task(submit, placed, traced.watching(deliver), traced)

    def _put_off(self, idx: int, full: MoesaicError) -> None:
        """Have a run wait until another one of the request ends, or for a moment: queues have no room for it.

        Raises:
            MoesaicError: ``full``, if no worker has, or had, anything of the request.
        """
        run = self.runs[idx]
        begun = run.token_ids or any(other.placed_at for other in self.runs if other is not run)
        if not begun:
            raise full
        self._leave_window(run)
        run.placed_at = None
        run.tried.clear()
        if (
            self._homes.get(run.family, _NO_HOME) is None
        ):  # another one may find the family's worker
            del self._homes[run.family]
        self._waiting.append(idx)
        self._keep_room(idx)
        self._window = self._num_under_way
        if not self._window and self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._try_again)

    def _try_again(self) -> None:
        self._pause = None
        self._window = max(1, self._window)
        self.wake()

    def _out_of_question(self, run: Run) -> set[Key]:
        """Find the workers that may not get a run.

        These are the workers of earlier attempts, unless there is no other. For siblings, these are all workers but
        that of their family, while it accepts work. For a caller's site, these are the workers of other sites, while
        a worker of that site accepts work.
        """
        accepting = self._accepting
        home = self._homes.get(run.family)
        if home in accepting - run.tried:
            return run.tried | (accepting - {home})
        if run.terms.site:
            near = {w.key for w in self._workers.accepting if w.record.site == run.terms.site}
            if near - run.tried:
                return run.tried | (accepting - near)
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
        """Take an event and give its news; a loss sets the run going elsewhere."""
        try:
            if isinstance(event, Tokens):
                return run.add_tokens(event)
            if isinstance(event, PromptLogprobs):
                return run.add_prompt_logprobs(event)
        except PeerLost as gap:
            self._hang_up(run)
            return self._try_elsewhere(idx, run, gap)
        if isinstance(event, Finished):
            run.finish(event)
            self._end(run)
            return event
        if isinstance(event, Scores | Pooled):
            return event
        error = WorkFailed(event) if isinstance(event, Failure) else event
        if isinstance(error, NotReady) and run.placed_at is None:
            # Nobody has come
            if not run.excluded:
                raise run.loss or error
            # Those that it waited for have gone: others will do.
            self._start(idx)
            return None
        if (
            error.code == "overloaded" and run.placed_at is None
        ):  # others go before, in our own queue
            run.pauses += 1
            self._put_off(idx, error)
            return None
        if error.code not in _TRY_ELSEWHERE or run.placed_at is None:
            raise error
        return self._try_elsewhere(idx, run, error)

    def _try_elsewhere(self, idx: int, run: Run, cause: MoesaicError) -> Finished | None:
        """Go on from the tokens so far, on another worker or on one that comes back.

        Sampling is by seed and position, so nothing changes.

        ===================================================  ==================================================
        a run that has                                       is given up
        ===================================================  ==================================================
        lost its worker eight times                          always; workers that were only paused do not count
        two losses to blame on it since its last token       if a worker serves, which might be the next one
        been refused by all workers                          if one of them serves; where their queues are full,
                                                             it is put off
        ===================================================  ==================================================
        """
        # Only the worker's last word was lost.
        if run.is_full:
            self._end(run)
            return Finished(reason=FINISH_REASON_LENGTH, prompt_tokens=len(run.prompt))
        # Or nothing could come back that is tried elsewhere.
        assert run.placed_at is not None
        run.tried.add(run.placed_at)
        run.loss = cause
        if len(run.token_ids) > run.start:
            run.blame = 0.0
        if isinstance(cause, WorkerLost):
            run.blame += cause.blame
            run.pauses += not cause.blame
        elif cause.code == "overloaded":
            run.pauses += 1
        elif cause.code != "draining":
            # Several workers may leave at once; each is tried once.
            run.blame += 1
        refused = not isinstance(cause, PeerLost) and not self._accepting - run.tried
        spent = refused or run.blame >= MOST_BLAME
        if run.attempt - run.pauses >= MAX_ATTEMPTS or (spent and self._accepting):
            if cause.code != "overloaded":
                raise cause
            self._put_off(idx, cause)
            return None
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
            if run.under_way.spans is not None:
                run.under_way.spans.end(cancelled=True)
