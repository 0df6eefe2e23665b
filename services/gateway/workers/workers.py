"""All attention workers of this gateway, with an ordered ``Execute`` stream to each, open while it is registered."""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog

from moesaic.addresses import is_host_port
from moesaic.cluster.background import again_and_again
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.waiting import Backoff
from moesaic.errors import Overloaded
from moesaic.messages.registry import WorkerRecord
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.gateway import metrics
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers.routing import Routing
from moesaic.services.gateway.workers.run import Key, Task, WorkerLost
from moesaic.v1.attention_pb2 import Cancel, ExecuteRequest, ExecuteResponse, WatchBlocks
from moesaic.v1.attention_pb2_grpc import AttentionServiceStub

if TYPE_CHECKING:
    from moesaic.v1.attention_pb2_grpc import AttentionServiceAsyncStub


log = structlog.get_logger()

CONNECT_S = 2.0
BACKOFF_S = (0.1, 2.0)  # first and longest pause between two attempts to connect
JITTER = (0.5, 1.5)
MAX_UNSENT = 4096  # commands that may wait for a worker to read them
# gRPC's words for a peer that did not answer a ping, or whose host did not: it is paused or cut off. The connection of
# a process that ends is closed or reset.
_UNANSWERED = ("timeout", "timed out")
_ABLE = ("ready", "standby")  # states in which a worker serves, or could


class WorkerStream:
    """One attention worker and the stream to it."""

    def __init__(self, record: WorkerRecord, idle_s: float, routing: Routing) -> None:
        self.record = record
        self.connected = False
        self._idle_s, self._routing = idle_s, routing
        self._tasks: dict[tuple[str, int], Task] = {}
        self._unsent: asyncio.Queue[ExecuteRequest | None] = asyncio.Queue()
        self._stream: grpc.aio.StreamStreamCall[ExecuteRequest, ExecuteResponse] | None = None
        self._heard_at = 0.0
        self._retired = asyncio.Event()

    @property
    def key(self) -> Key:
        """Name of this life of the worker, unlike those of its others."""
        return self.record.worker_id, self.record.generation

    @property
    def accepting(self) -> bool:
        """True if it may get new work."""
        return self.connected and not self._retired.is_set() and self.record.state == "ready"

    def submit(self, task: Task) -> None:
        """Give it a task; its events come through ``task.deliver``, the last one is terminal.

        Raises:
            Overloaded: the worker does not read its commands.
        """
        if self._unsent.qsize() >= MAX_UNSENT:
            raise Overloaded("the attention worker does not take requests fast enough")
        if not self._tasks:
            self._heard_at = asyncio.get_running_loop().time()
        self._tasks[task.key] = task
        self._unsent.put_nowait(ExecuteRequest(submit=task.submit))

    def cancel(self, task: Task) -> None:
        """Tell it to stop a task; no more events of it are delivered."""
        if self._forget(task.key) is not None:
            request_id, attempt = task.key
            cancel = Cancel(request_id=request_id, attempt=attempt)
            self._unsent.put_nowait(ExecuteRequest(cancel=cancel))

    def renew(self, record: WorkerRecord) -> None:
        """Adopt its newest record; its lease may have lapsed for a while."""
        self.record = record
        self._retired.clear()
        self._show()

    def retire(self) -> None:
        """Give it nothing new, and hang up when its last task is done."""
        self._retired.set()
        self._show()
        if not self._tasks and self._stream is not None:
            self._stream.cancel()

    def _show(self) -> None:
        """Tell the router if work may come."""
        if self.connected:
            self._routing.accept(self.key, self.accepting)

    async def run(self) -> None:
        """Keep the stream open until the worker is retired and idle."""
        backoff = Backoff(*BACKOFF_S, jitter=JITTER)
        while not self._retired.is_set():
            record = self.record
            try:
                # gRPC never closes a channel to what is no address.
                if not is_host_port(record.admin_address):
                    raise TimeoutError
                async with channel(record.admin_address, record.worker_id) as connection:
                    async with asyncio.timeout(CONNECT_S):
                        await connection.channel_ready()
                    backoff.reset()
                    cause = await self._talk(AttentionServiceStub(connection))
            except TimeoutError:
                cause = "cannot be reached"
            if (me := asyncio.current_task()) is not None and me.cancelling():
                # gRPC keeps a cancellation to itself that comes while a stream begins and fails.
                raise asyncio.CancelledError
            if not self._retired.is_set():
                log.warning("worker.disconnected", worker_id=self.record.worker_id, cause=cause)
                await self._pause(backoff.next_pause_s())

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._retired.wait()
        except TimeoutError:
            return

    async def _talk(self, stub: "AttentionServiceAsyncStub") -> str:
        """Read events until the stream ends.

        Returns:
            The cause of its end.
        """
        unsent = self._unsent = asyncio.Queue()
        stream = self._stream = stub.Execute(_commands(unsent))
        self.connected = True
        unsent.put_nowait(ExecuteRequest(watch_blocks=WatchBlocks()))
        self._routing.connected(self.key)
        self._show()
        metrics.workers.inc()
        self._heard_at = asyncio.get_running_loop().time()
        log.info("worker.connected", worker_id=self.record.worker_id)
        watch = asyncio.create_task(self._watch(stream))
        cause, paused = "ended its stream", False
        try:
            async for response in stream:
                self._take(response)
        except grpc.aio.AioRpcError as error:
            cause = f"connection broke ({error.code().name.lower()})"
            paused = any(words in (error.details() or "").lower() for words in _UNANSWERED)
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                cause = f"refuses this gateway: {error.details()}"
        except asyncio.CancelledError:
            if not stream.cancelled() or (me := asyncio.current_task()) is None or me.cancelling():
                raise
            cause = "sent nothing for too long"
        finally:
            self.connected, self._stream = False, None
            metrics.workers.dec()
            watch.cancel()
            stream.cancel()
            # A stream that has ended by itself leaves its reader waiting.
            unsent.put_nowait(None)
            self._lose_all(cause, paused=paused)
        return cause

    def _take(self, response: ExecuteResponse) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        for one in response.together or (response,):
            self._take_one(one)

    def _take_one(self, response: ExecuteResponse) -> None:
        kind = response.WhichOneof("event")
        if kind is None:
            # A sign of life, or an event of a later version.
            return
        if kind == "block_snapshot":
            self._routing.snapshot(self.key, response.block_snapshot)
            return
        if kind == "block_changes":
            if not self._routing.changes(self.key, response.block_changes):
                self._unsent.put_nowait(ExecuteRequest(watch_blocks=WatchBlocks()))
            return
        if kind == "others_work":
            self._routing.others(self.key, response.others_work)
            return
        task = self._tasks.get((response.request_id, response.attempt))
        if task is None:
            return
        if kind in ("progress", "tokens", "finished"):
            self._routing.progressed(task, getattr(response, kind))
        if kind in ("finished", "failure"):
            self._forget(task.key)
        if kind != "progress":
            task.deliver(getattr(response, kind))

    def _forget(self, key: tuple[str, int]) -> Task | None:
        task = self._tasks.pop(key, None)
        if task is not None:
            self._routing.withdraw(task)
        if not self._tasks and self._retired.is_set() and self._stream is not None:
            self._stream.cancel()
        return task

    def _lose_all(self, cause: str, *, paused: bool) -> None:
        tasks, self._tasks = self._tasks, {}
        self._routing.disconnected(self.key)
        for task in tasks.values():
            task.deliver(WorkerLost(cause, 0.0 if paused else 1 / len(tasks)))

    async def _watch(
        self, stream: grpc.aio.StreamStreamCall[ExecuteRequest, ExecuteResponse]
    ) -> None:
        """Hang up on a worker that owes answers and is silent: its work is carried on elsewhere."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            silent_s = asyncio.get_running_loop().time() - self._heard_at
            if self._tasks and silent_s > self._idle_s:
                stream.cancel()


async def _commands(
    unsent: asyncio.Queue[ExecuteRequest | None],
) -> AsyncIterator[ExecuteRequest]:
    while (command := await unsent.get()) is not None:
        yield command


class FleetView(Protocol):
    """The part of ``moesaic.cluster.registry.Fleet`` that is needed here."""

    workers: dict[str, WorkerRecord]
    version: int

    async def changed(self, since: int | None = None) -> None:
        """Wait for the next change after version ``since``."""
        ...


class Workers:
    """All attention workers in the cluster, as far as they can be reached."""

    def __init__(self, config: ModelConfig, settings: GatewaySettings) -> None:
        self._idle_s = settings.stream_idle_s
        self.routing = Routing(config, settings, self._place)
        self.model_digest = ""  # what is served; empty until a worker has told it
        self._config_digest = config.answering_digest
        self._refused: set[Key] = set()
        self._workers: dict[Key, WorkerStream] = {}

    @property
    def accepting(self) -> list[WorkerStream]:
        """Workers that may get new work."""
        return [worker for worker in self._workers.values() if worker.accepting]

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request that any of them can take, prompt and answer together; 0: none tells."""
        told = [worker.record.max_request_tokens for worker in self.accepting]
        return min(filter(None, told), default=0)

    def submit(self, task: Task, excluded: Collection[Key]) -> None:
        """Have a task placed with the worker that the router picks, at once or when it should have
        more to do.

        Raises:
            NotReady: no worker is left, and none has come back for a while.
            Overloaded: too many tasks wait.
        """
        self.routing.submit(task, excluded)

    def cancel(self, task: Task) -> None:
        """Stop a task, wherever it is; no more events of it are delivered."""
        key = self.routing.placed_at(task)
        # It waits, or has ended.
        if key is None:
            self.routing.withdraw(task)
        else:
            self._workers[key].cancel(task)

    def _place(self, key: Key, task: Task) -> None:
        task.placed(key)
        try:
            self._workers[key].submit(task)
        except Overloaded as error:
            self.routing.router.withdraw(task)
            task.deliver(error)

    async def follow(self, fleet: FleetView) -> None:
        """Open and close streams as workers come and go; runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                version = fleet.version
                self._sync(fleet.workers, group)
                await fleet.changed(version)

    def _sync(self, records: dict[str, WorkerRecord], group: asyncio.TaskGroup) -> None:
        attention = [r for r in records.values() if r.takes_requests and r.state != "starting"]
        attention = self._of_one_model(attention)
        registered = {(record.worker_id, record.generation): record for record in attention}
        for key, record in registered.items():
            if key in self._workers:
                self._workers[key].renew(record)
            elif record.state in _ABLE:
                # One that is activated is connected already.
                self._workers[key] = WorkerStream(record, self._idle_s, self.routing)
                group.create_task(self._keep(self._workers[key]), name=f"worker {record.worker_id}")
        for key in self._workers.keys() - registered.keys():
            self._workers[key].retire()

    def _of_one_model(self, records: list[WorkerRecord]) -> list[WorkerRecord]:
        """Choose the workers with this gateway's configuration, all with the same weights.

        The weights that were served are served on as long as any worker has them.
        """
        ours = [r for r in records if r.config_digest in ("", self._config_digest)]
        # Of those on standby only where none serves.
        able = sorted(
            (r for r in ours if r.state in _ABLE),
            key=lambda r: (_ABLE.index(r.state), r.generation),
        )
        if able and self.model_digest not in {r.model_digest for r in ours}:
            self.model_digest = able[0].model_digest
            self.routing.of_model(self.model_digest)
        alike = [r for r in ours if r.model_digest == self.model_digest]
        for record in records:
            key = record.worker_id, record.generation
            if record not in alike and key not in self._refused:
                self._refused.add(key)
                log.error(
                    "worker.other_model",
                    worker_id=record.worker_id,
                    model_digest=record.model_digest,
                    served_digest=self.model_digest,
                    other_config=record not in ours,
                )
        self._refused &= {(r.worker_id, r.generation) for r in records}
        return alike

    async def _keep(self, worker: WorkerStream) -> None:
        try:
            await again_and_again(worker.run, "worker stream")
        finally:
            del self._workers[worker.key]
