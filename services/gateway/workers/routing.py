"""The prefix router at work: the workers' streams report to it, and it gives each task a worker."""

import asyncio
import math
from collections.abc import Callable, Collection

import structlog

from moesaic.errors import NotReady, Overloaded
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.configuration.flops import flops_of, saturation_of
from moesaic.prefix.blocks import BLOCK_SIZE, HASH_BYTES, BlockFeed, BlockHasher, naming_key
from moesaic.prefix.fleet import Job, OthersWork, QueueLimits
from moesaic.prefix.router import PrefixRouter, RouterLimits
from moesaic.services.gateway import metrics
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers.run import Key, Task
from moesaic.telemetry.metrics import series
from moesaic.v1.attention_pb2 import (
    POOLING_MEAN,
    BlockChanges,
    BlockSnapshot,
    EngineProfile,
    Finished,
    Progress,
    Submit,
    Tokens,
)
from moesaic.v1.attention_pb2 import OthersWork as TheirWork

WEIGHT = 1 / 32  # of the newest answer
log = structlog.get_logger()

MAX_WAIT_S = 1.0  # that saturated workers hold a request back
QUEUED_PER_REQUEST = 4.0  # a request may have several sequences
MAX_BLOCKS = 1 << 19  # pairs of worker and cached block, about 150 bytes each
NEVER_SATURATED = 1 << 80  # FLOPs; until a worker has said how large its steps are
Place = Callable[[Key, Task], None]


class AnswerLengths:
    """A moving average of the lengths of answers, in tokens."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def add(self, num_tokens: int) -> None:
        """Note the length of an answer that has ended."""
        mean = num_tokens if self._mean is None else self._mean
        self._mean = mean + WEIGHT * (num_tokens - mean)

    def expected(self, max_tokens: int) -> int:
        """Expect a length of an answer that may have ``max_tokens``; at least 1."""
        mean = max_tokens if self._mean is None else math.ceil(self._mean)
        return max(1, min(max_tokens, mean))


class Routing:
    """Routes tasks to the workers that are connected."""

    def __init__(self, config: ModelConfig, settings: GatewaySettings, place: Place) -> None:
        """Route by ``place``, which gives a task to a worker."""
        self._key = naming_key(
            settings.block_secret.get_secret_value(), settings.secret.get_secret_value()
        )
        self.of_model(config.digest)
        self._config, self._flops = config, flops_of(config)
        self._pinned = round(settings.router_saturation_flops)
        self._lengths = AnswerLengths()
        self._place = place
        self._feeds: dict[Key, BlockFeed] = {}
        self._sweeping: set[Key] = set()  # those that store no KV of scoring, unless asked to
        self._timer: asyncio.TimerHandle | None = None
        self._recovery_s = settings.recovery_s
        self._hopeful = False  # a worker takes tasks, or did so lately
        self._despair: asyncio.TimerHandle | None = None  # runs while none does
        limits = RouterLimits(
            BLOCK_SIZE,
            MAX_BLOCKS,
            round(QUEUED_PER_REQUEST * settings.max_inflight),
            MAX_WAIT_S,
        )
        self.router = PrefixRouter(self._flops, limits, settings.router_policy)
        metrics.router_queued.set_function(lambda: self.router.num_queued)
        metrics.router_index_blocks.set_function(lambda: len(self.router.fleet.index))

    def of_model(self, digest: str) -> None:
        """Name blocks as the workers of a model do."""
        self._hasher = BlockHasher(self._key, digest, BLOCK_SIZE)

    def submit(self, task: Task, excluded: Collection[Key]) -> None:
        """Have a task placed, now or when a worker is free for it; without exclusions also while workers may come back.

        Raises:
            NotReady: there is no worker that the task may go to.
            Overloaded: too many tasks wait.
        """
        job = self._job(task.submit, task, excluded)
        if self._is_hopeless(job):
            raise _no_worker()
        for left in self.router.submit(job, asyncio.get_running_loop().time()):
            left.job_id.deliver(Overloaded("too many requests wait, and others had fewer"))
        self.dispatch()

    def withdraw(self, task: Task) -> None:
        """Forget a task that has ended or is no longer wanted."""
        before = self._room()
        if self.router.withdraw(task):
            self._look_again(before)

    def placed_at(self, task: Task) -> Key | None:
        """Find the worker that has a task, if one has."""
        routed = self.router.fleet.routed.get(task)
        if routed is None:
            return None
        key: Key = routed.worker.key
        return key

    def dispatch(self) -> None:
        """Place the tasks that can be placed now."""
        router, now_s = self.router, asyncio.get_running_loop().time()
        for decision in router.route(now_s):
            series(metrics.router_decisions, router.policy_name).inc()
            if decision.spilled:
                metrics.router_spills.inc(decision.spilled)
            cached = router.fleet.cached_tokens(decision.job, decision.cached_blocks)
            metrics.router_cached_tokens.inc(cached)
            task: Task = decision.job.job_id
            if task.spans is not None:
                why: dict[str, str | int] = {
                    "moesaic.routing.policy": router.policy_name,
                    "moesaic.routing.cached_tokens": cached,
                    "moesaic.routing.spilled": decision.spilled,
                    "moesaic.routing.excluded": len(decision.job.excluded),
                }
                task.spans.routed(decision.worker, why)
            self._place(decision.worker, task)
        self._wake(now_s)

    def connected(self, key: Key) -> None:
        """Add a worker that is connected; it gets no tasks before ``accept``."""
        self.router.fleet.join(key, self._pinned or NEVER_SATURATED)
        self._feeds[key] = BlockFeed(self.router.fleet.index, self.router.fleet.workers[key].bit)

    def accept(self, key: Key, accepting: bool) -> None:
        """Let a connected worker have tasks, or no more."""
        self.router.fleet.accept(key, accepting)
        self._look_who_accepts()

    def disconnected(self, key: Key) -> None:
        """Forget a worker that is gone, with all tasks that were placed there."""
        self.router.fleet.leave(key)
        del self._feeds[key]
        self._sweeping.discard(key)
        self._look_who_accepts()

    def progressed(self, task: Task, event: Progress | Tokens | Finished) -> None:
        """Note the progress of a task."""
        before = self._room()
        if isinstance(event, Progress):
            self.router.fleet.progressed(task, event.computed_tokens, 0)
        elif isinstance(event, Tokens):
            answered = event.token_index + len(event.token_ids)
            self.router.fleet.progressed(task, 0, answered)
        elif task.submit.HasField("generation"):
            self._lengths.add(event.completion_tokens)
        self._look_again(before)

    def snapshot(self, key: Key, told: BlockSnapshot) -> None:
        """Take one part of a worker's report of all its blocks; the first part describes its engine, too."""
        if told.first:
            self._describe(key, told.engine)
        if self.router.fleet.workers[key].caches:
            self._feeds[key].snapshot(told.sequence, _names(told.hashes), first=told.first)
        self.dispatch()

    def changes(self, key: Key, told: BlockChanges) -> bool:
        """Take a worker's changes.

        Returns:
            False if it has to report all its blocks again.
        """
        if not self.router.fleet.workers[key].caches:
            return True
        complete = self._feeds[key].changes(
            told.sequence, _names(told.stored), _names(told.evicted)
        )
        if not complete:
            metrics.router_gaps.inc()
        return complete

    def others(self, key: Key, told: TheirWork) -> None:
        """Take a worker's report of the work that other gateways gave it."""
        before = self._room()
        work = OthersWork(told.num_requests, told.num_tokens, round(told.flops))
        self.router.fleet.others_have(key, work)
        self._look_again(before)

    def _describe(self, key: Key, engine: EngineProfile) -> None:
        caches = engine.naming == self._hasher.naming
        if engine.naming and not caches:
            log.error(
                "blocks.named_differently",
                worker_id=key[0],
                fix="give gateways and attention workers the same --block-secret, or --secret",
            )
        # 0: not measured
        slowdown = max(1.0, engine.slowdown)
        rows = engine.max_step_tokens
        saturation = self._pinned or saturation_of(self._config, rows, slowdown)
        self.router.fleet.describe(
            key,
            saturation=saturation or NEVER_SATURATED,
            caches=caches,
            slowdown=slowdown,
            limits=QueueLimits(
                engine.max_waiting_requests, engine.max_waiting_tokens, engine.max_running_requests
            ),
        )
        (self._sweeping.add if engine.sweeps_scores else self._sweeping.discard)(key)

    def _job(self, submit: Submit, task: Task, excluded: Collection[Key]) -> Job:
        answer_tokens, sibling_tokens, reuses = 1, 0, True
        if submit.HasField("generation"):
            generation = submit.generation
            answer_tokens = self._lengths.expected(generation.max_tokens)
            # Such a prompt is computed whole.
            reuses = not generation.HasField("prompt_logprobs")
        else:
            read = submit.embedding if submit.HasField("embedding") else submit.scoring
            sibling_tokens = sum(len(c.token_ids) - 1 for c in submit.scoring.candidates)
            # As workers do by default; they are all set up alike.
            stored = not self._sweeping
            reuses = read.store_kv if read.HasField("store_kv") else stored
            # A mean is of all rows.
            reuses = reuses and submit.embedding.pooling != POOLING_MEAN
        hashes: list[bytes] = []
        if reuses:
            root = self._hasher.root(submit.cache_salt)
            self._hasher.extend(hashes, root, submit.token_ids)
        return Job(
            job_id=task,
            num_tokens=len(submit.token_ids),
            hashes=hashes,
            answer_tokens=answer_tokens,
            sibling_tokens=max(0, sibling_tokens),
            priority=submit.priority,
            excluded=frozenset(excluded),
            tenant=submit.tenant,
            part_of=submit.part_of,
        )

    def _room(self) -> tuple[int, int]:
        """Give the state that a round depends on: without a change of it no waiting task can be placed."""
        return self.router.fleet.unsaturated, self.router.fleet.prefilling

    def _look_again(self, before: tuple[int, int]) -> None:
        """Begin a round, which goes through all that wait, only if there is reason to."""
        if self.router.num_queued and self._room() != before:
            self.dispatch()

    def _look_who_accepts(self) -> None:
        """Go on with other workers that accept tasks now; if none does, tasks wait for a while."""
        if self.router.fleet.accepting:
            self._hopeful = True
            if self._despair is not None:
                self._despair.cancel()
                self._despair = None
        elif self._hopeful and self._despair is None:
            loop = asyncio.get_running_loop()
            self._despair = loop.call_later(self._recovery_s, self._lose_hope)
        self._give_up()
        self.dispatch()

    def _lose_hope(self) -> None:
        self._hopeful, self._despair = False, None
        self._give_up()

    def _is_hopeless(self, job: Job) -> bool:
        """Tell if a job can go to no worker that there is, or may come back."""
        return not self.router.allowed(job) and (bool(job.excluded) or not self._hopeful)

    def _give_up(self) -> None:
        """End the tasks that wait for workers that do not come."""
        for job in self.router.unroutable():
            if self._is_hopeless(job):
                self.router.withdraw(job.job_id)
                job.job_id.deliver(_no_worker())

    def _wake(self, now_s: float) -> None:
        """Look again when a task has waited as long as it may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        overdue_s = self.router.next_overdue_s()
        if overdue_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(overdue_s, now_s), self.dispatch)


def _no_worker() -> NotReady:
    return NotReady("no attention worker can take requests", code="no_attention_worker")


def _names(packed: bytes) -> list[bytes]:
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
