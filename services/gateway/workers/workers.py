"""All attention workers that this gateway may use."""

import asyncio
from collections.abc import Collection
from typing import Protocol

import structlog

from moesaic.cluster.background import again_and_again
from moesaic.errors import Overloaded
from moesaic.messages.registry import WorkerRecord
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers.routing import Routing
from moesaic.services.gateway.workers.stream import WorkerStream
from moesaic.services.gateway.workers.tasks import Key, Task

log = structlog.get_logger()

_ABLE = ("ready", "standby")  # states in which a worker serves, or could


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
        if key is None:  # it waits, or has ended
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
            elif record.state in _ABLE:  # one that is activated is connected already
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
