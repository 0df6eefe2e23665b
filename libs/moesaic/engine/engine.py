"""The step loop: plan, run the decoder, sample, tell.

Lives on the engine thread's event loop and owns everything torch. Requests come in through
``submit`` and ``cancel``; events go out through one callback, a step's events together.

An expert worker that is lost does not fail requests at once: nothing of the failed step counts, and
the same rows are run again when the experts can be reached. A request gives up at its own deadline,
or after ``recovery_s`` without progress.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from prometheus_client import Counter, Gauge, Histogram
from torch import Tensor

from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.engine.batching import Batcher, Plan, Tally
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.limits import Limits
from moesaic.engine.logprobs import describe_picked, describe_prompt
from moesaic.engine.processors import process
from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    FinishReason,
    Request,
    RequestKey,
    ScoreEvent,
    TokenEvent,
    TokenLogprob,
)
from moesaic.engine.sampling import sample
from moesaic.engine.sequences import Answer, Chunk, Score, Work, count_epoch
from moesaic.errors import DeadlineExceeded, ExpertUnavailable, MoesaicError, NotReady
from moesaic.models.decoder import Decoder
from moesaic.models.step_batch import StepBatch
from moesaic.prefix.block_hashes import BlockHasher

log = structlog.get_logger()

STEP_SECONDS = Histogram(
    "moesaic_step_seconds",
    "Duration of one forward pass",
    buckets=[0.001 * 2**i for i in range(14)],
)
STEP_ROWS = Histogram(
    "moesaic_step_rows", "Rows of one forward pass", buckets=[2**i for i in range(14)]
)
STEP_RETRIES = Counter(
    "moesaic_step_retries_total", "Forward passes that failed and were run again"
)
RUNNING = Gauge("moesaic_num_requests_running", "Requests being computed")
WAITING = Gauge("moesaic_num_requests_waiting", "Requests waiting to be computed")
BLOCKS_USED = Gauge("moesaic_kv_blocks_used", "KV blocks in use")
BLOCKS_CACHED = Gauge(
    "moesaic_kv_blocks_cached", "Free KV blocks that a prompt can still start with"
)
PREFIX_QUERIES = Counter(
    "moesaic_prefix_cache_queries_total", "Tokens of requests that were looked for in the cache"
)
PREFIX_HITS = Counter("moesaic_prefix_cache_hits_total", "Those of them whose KV was there")
PREEMPTIONS = Counter(
    "moesaic_num_preemptions_total", "Generations that gave up their KV to older ones"
)

STALL_POLL_S = (
    0.05  # how often deadlines and cancellations are looked at while experts cannot be reached
)


@dataclass(frozen=True)
class Load:
    """What an engine has to do, for routing and for operators."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    epoch: int
    waiting_for: tuple[str, ...]


class Engine:
    """Runs requests on one decoder through one dispatcher."""

    def __init__(
        self,
        decoder: Decoder,
        dispatcher: Dispatcher,
        limits: Limits,
        num_blocks: int,
        emit: Callable[[list[Event]], None],
        recovery_s: float,
        hasher: BlockHasher | None = None,
    ) -> None:
        """``hasher`` turns the prefix cache on."""
        self._decoder, self._dispatcher = decoder, dispatcher
        self._cache = decoder.new_kv_cache(num_blocks, BLOCK_SIZE)
        self.batcher = Batcher(limits, num_blocks, hasher)
        self._emit, self._recovery_s = emit, recovery_s
        self._work_came = asyncio.Event()
        self._epoch = 0

    def submit(self, request: Request) -> None:
        """Take a request; what is wrong with it comes back as its one event."""
        try:
            self.batcher.submit(request)
        except MoesaicError as error:
            self._emit([FailureEvent(request.key, error)])
        self._work_came.set()

    def cancel(self, key: RequestKey) -> None:
        """Forget a request; no event of it follows. Unknown keys are ignored."""
        self.batcher.cancel(key)

    def load(self) -> Load:
        """What there is to do now."""
        pool = self.batcher.pool
        return Load(
            num_running=len(self.batcher.running),
            num_waiting=len(self.batcher.waiting),
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            epoch=self._epoch,
            waiting_for=tuple(self._dispatcher.waiting_for),
        )

    async def run(self) -> None:
        """Run steps until cancelled. A step that fails for a reason of its own fails its requests,
        not the loop."""
        while True:
            self._expire()
            self._observe()
            if not self.batcher.everything():
                self._work_came.clear()
                await self._work_came.wait()
                continue
            try:
                step = self._dispatcher.begin_step()
            except NotReady as error:
                await self._stall(error)
                continue
            plan = self.batcher.plan()
            if plan.chunks:  # else everything was cancelled or preempted while planning
                await self._run_step(step, plan)
            self._dispatcher.end_step(step)
            await asyncio.sleep(0)  # let submissions and cancellations in

    async def _run_step(self, step: Step, plan: Plan) -> None:
        started = time.monotonic()
        events: list[Event] = []
        try:
            batch = _to_batch(plan.chunks)
            self._cache.copy_blocks(plan.copies)
            logits = await self._decoder.forward(
                batch,
                self._cache,
                lambda layer, hidden: self._dispatcher.dispatch(step, layer, hidden),
            )
            self._advance(plan.chunks, logits, step.epoch, events)
        except MoesaicError as error:
            STEP_RETRIES.inc()
            await self._stall(error)
            return
        except Exception:
            log.exception("step.failed", rows=sum(len(c.token_ids) for c in plan.chunks))
            self._emit(events)  # of those that had moved on already
            self._fail(
                [c.owner for c in plan.chunks],
                MoesaicError("the step failed; see the worker's log"),
            )
            return
        STEP_SECONDS.observe(time.monotonic() - started)
        STEP_ROWS.observe(len(batch.token_ids))
        self._epoch = step.epoch
        self._emit(events)

    def _advance(
        self, chunks: list[Chunk], logits: Tensor, epoch: int, events: list[Event]
    ) -> None:
        """Move the state on after a successful step, and add what there is to tell to ``events``;
        ``logits`` has the wanted rows of all chunks, in order."""
        live = set()  # a request may have been cancelled during the step
        for work in self.batcher.everything():
            live.add(id(work))
            work.stalled_since_s = None  # experts can be reached again, also for who had no turn
        offset, answers = 0, []
        for chunk in chunks:
            rows = logits[offset : offset + chunk.wanted]
            offset += chunk.wanted
            if id(chunk.owner) not in live:
                continue
            if isinstance(chunk.owner, Score):
                self._advance_score(chunk.owner, chunk, rows, epoch, events)
            else:
                self.batcher.commit(chunk)
                if chunk.owner.describes_prompt:
                    events.append(describe_prompt(chunk.owner, chunk, rows))
                if chunk.owner.computed < len(chunk.owner.tokens):
                    continue
                if chunk.owner.work.max_tokens:
                    answers.append((chunk.owner, rows[-1]))
                else:
                    self._finish_answer(chunk.owner, "length", None, events)
        if answers:
            owners = [answer for answer, _ in answers]
            rows = torch.stack([row for _, row in answers])
            picked = sample(
                process(rows, owners),
                [(answer.work.sampling, len(answer.tokens)) for answer in owners],
            )
            logprobs = describe_picked(rows, owners, picked)
            for answer, token, logprob in zip(owners, picked, logprobs, strict=True):
                self._advance_answer(answer, token, logprob, epoch, events)

    def _advance_answer(
        self,
        answer: Answer,
        token: int,
        logprob: TokenLogprob | None,
        epoch: int,
        events: list[Event],
    ) -> None:
        work, index, key = answer.work, answer.num_generated, answer.request.key
        count_epoch(answer.epochs, epoch, 1)
        stopped = token in work.stop_token_ids
        if not stopped:
            answer.tokens.append(token)
            events.append(TokenEvent(key, index, token, logprob))
        matcher = answer.logit_state.matcher if answer.logit_state else None
        if matcher is not None and not stopped:
            matcher.follow(answer.answer)
            if matcher.failure:
                error = MoesaicError(f"the answer's grammar was given up: {matcher.failure}")
                self.batcher.finish(answer)
                events.append(FailureEvent(key, error))
                return
            stopped = matcher.complete
        if stopped or answer.num_generated == work.max_tokens:
            stop_token_id = token if token in work.stop_token_ids else None
            self._finish_answer(answer, "stop" if stopped else "length", stop_token_id, events)

    def _finish_answer(
        self,
        answer: Answer,
        reason: FinishReason,
        stop_token_id: int | None,
        events: list[Event],
    ) -> None:
        self.batcher.finish(answer)
        events.append(
            FinishEvent(
                answer.request.key,
                reason,
                prompt_tokens=len(answer.request.token_ids),
                completion_tokens=answer.num_generated + int(stop_token_id is not None),
                epochs=tuple(answer.epochs),
                stop_token_id=stop_token_id,
                cached_tokens=answer.num_cached or 0,
            )
        )

    def _advance_score(
        self, score: Score, chunk: Chunk, rows: Tensor, epoch: int, events: list[Event]
    ) -> None:
        candidates = score.work.candidates
        self.batcher.commit(chunk)
        if chunk.candidate is None:
            if not chunk.wanted:
                return
            first = rows[0].log_softmax(dim=-1)
            score.logprobs = [float(first[candidate[0]]) for candidate in candidates]
            score.pending = [i for i, candidate in enumerate(candidates) if len(candidate) > 1]
        else:
            later = torch.tensor(candidates[chunk.candidate][1:])
            gained = rows.log_softmax(dim=-1).gather(1, later.to(rows.device).unsqueeze(1)).sum()
            score.logprobs[chunk.candidate] += float(gained)
        count_epoch(score.epochs, epoch, 1)
        if not score.pending:
            self.batcher.finish(score)
            key = score.request.key
            events.append(ScoreEvent(key, tuple(score.logprobs)))
            events.append(
                FinishEvent(
                    key,
                    "stop",
                    prompt_tokens=len(score.request.token_ids),
                    completion_tokens=0,
                    epochs=tuple(score.epochs),
                    cached_tokens=score.num_cached or 0,
                )
            )

    async def _stall(self, error: MoesaicError) -> None:
        """Experts cannot be reached: wait a little, and fail whoever has waited too long."""
        now = time.monotonic()
        work = self.batcher.everything()
        if not error.retryable:
            self._fail(work, error)
            return
        for item in work:
            if item.stalled_since_s is None:
                item.stalled_since_s = now
        expired = [
            w
            for w in work
            if w.stalled_since_s is not None and now - w.stalled_since_s >= self._recovery_s
        ]
        if expired:
            cause = (
                error
                if isinstance(error, ExpertUnavailable)
                else ExpertUnavailable(-1, cause=str(error))
            )
            log.warning("requests.gave_up", count=len(expired), cause=str(error))
            self._fail(expired, cause)
        try:
            await asyncio.wait_for(self._dispatcher.reachable(), STALL_POLL_S)
        except TimeoutError:
            return
        await asyncio.sleep(0.01)  # reachable, and yet the step failed: do not spin

    def _expire(self) -> None:
        for work in self.batcher.expired(time.monotonic()):
            self._fail([work], DeadlineExceeded("the request", work.request.budget_ms))

    def _fail(self, work: list[Work], error: MoesaicError) -> None:
        unfinished = set(map(id, self.batcher.everything()))
        failed = {id(w): w for w in work if id(w) in unfinished}
        for item in failed.values():
            self.batcher.finish(item)
        self._emit([FailureEvent(item.request.key, error) for item in failed.values()])

    def _observe(self) -> None:
        RUNNING.set(len(self.batcher.running))
        WAITING.set(len(self.batcher.waiting))
        BLOCKS_USED.set(self.batcher.pool.num_used)
        BLOCKS_CACHED.set(self.batcher.pool.num_cached)
        tally, self.batcher.tally = self.batcher.tally, Tally()
        PREEMPTIONS.inc(tally.preemptions)
        PREFIX_QUERIES.inc(tally.prefix_queries_tokens)
        PREFIX_HITS.inc(tally.prefix_hits_tokens)


def _to_batch(chunks: list[Chunk]) -> StepBatch:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]
    wanted: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        wanted += range(end - chunk.wanted, end)
    return StepBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        sequence_rows=[len(chunk.token_ids) for chunk in chunks],
        block_tables=[chunk.block_table for chunk in chunks],
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
    )
