"""The calls of operators that every service answers, and the state behind the answers."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import grpc
import structlog
from prometheus_client import Gauge

from moesaic import __version__
from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.registry import WorkerState
from moesaic.settings import ServiceSettings, redacted
from moesaic.telemetry import logs, metrics
from moesaic.telemetry.loading import LoadProgress
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc

log = structlog.get_logger()

DrainHook = Callable[[bool], Awaitable[None]]
StandbyHook = Callable[[], Awaitable[None]]
_Context = grpc.aio.ServicerContext[Any, Any]
_STATES: dict[WorkerState, pb.ServiceState.ValueType] = {
    "starting": pb.SERVICE_STATE_STARTING,
    "ready": pb.SERVICE_STATE_READY,
    "draining": pb.SERVICE_STATE_DRAINING,
    "standby": pb.SERVICE_STATE_STANDBY,
}
_CAN_STAND_BY = ("attention", "expert")

_state = Gauge("moesaic_service_state", "1 for the current state of this process", ["state"])
_build = Gauge(
    "moesaic_build_info", "1, with the version and the kind of this service", ["version", "service"]
)


class ServiceStatus:
    """The state of this process, as ``GetInfo`` and the health service show it.

    Draining overlays the other states: a service that becomes ready while it drains shows draining
    until ``undrain``. A worker that is to stand by also shows ``draining``, until it is idle.

    Attributes:
        drained: operators drained it, or it stops.
        standing_by: it takes no work, by order or from its start.
    """

    def __init__(self, service: str, worker_id: str, generation: int) -> None:
        self.service, self.worker_id = service, worker_id
        self.generation = generation  # 0 until the registry gives one
        self.waiting_for: list[str] = []  # reasons why it is not ready, for people
        self.epoch = 0  # highest placement epoch seen
        self.model_digest = ""
        # Of a worker, once its weights are loaded.
        self.dtype = self.quantization = ""
        self.data_address = self.weights_address = ""
        self.metrics_address = ""
        self.model = ""  # its name, for people
        self.progress: LoadProgress | None = None  # of loading weights; None: it has none
        self.changed = asyncio.Event()  # set by a change of state, cleared by the health service
        self.drained = self.standing_by = False
        self._state: WorkerState = "starting"
        self._rests = False  # it has nothing to do
        _build.labels(__version__, service).set(1)
        self._show()

    @property
    def state(self) -> WorkerState:
        """``starting``, ``ready``, ``draining`` or ``standby``."""
        if self.drained:
            return "draining"
        if self.standing_by and self._state == "ready":
            return "standby" if self._rests else "draining"
        return self._state

    def set_state(self, state: WorkerState) -> None:
        """Enter a state; a change is logged once."""
        before = self.state
        if state == "draining":
            self.drained = True
        else:
            self._state = state
        self._note(before)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name a cause of waiting for the length of the block."""
        self.waiting_for.append(what)
        try:
            yield
        finally:
            # Somebody wrote the list anew.
            with suppress(ValueError):
                self.waiting_for.remove(what)

    def undrain(self) -> None:
        """Return to the state before draining."""
        before, self.drained = self.state, False
        self._note(before)

    def stand_by(self, on: bool) -> None:
        """Take no work from now on, or take work again; a worker without work is on standby at once."""
        before = self.state
        if on != self.standing_by:
            self.standing_by, self._rests = on, on and self._state == "starting"
        self._note(before)

    def rest(self, rests: bool) -> None:
        """Record if a worker that stands by is idle."""
        before, self._rests = self.state, rests
        self._note(before)

    def _note(self, before: WorkerState) -> None:
        if self.state != before:
            log.info("service.state", state=self.state, before=before)
            self._show()
            self.changed.set()

    def _show(self) -> None:
        for state in _STATES:
            _state.labels(state).set(state == self.state)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """``moesaic.v1.AdminService`` of any service."""

    def __init__(
        self, settings: ServiceSettings, status: ServiceStatus, stop: asyncio.Event
    ) -> None:
        self.on_drain: list[DrainHook] = []  # called with True to drain, False to accept work again
        self.on_stand_by: list[StandbyHook] = []  # called after ``status.standing_by`` has changed
        self.grace_s = settings.grace_s
        self._settings, self._status, self._stop = settings, status, stop
        self._started = time.monotonic()

    async def GetInfo(self, request: pb.GetInfoRequest, context: _Context) -> pb.GetInfoResponse:
        """Describe this process: name, state, addresses, and reasons why it is not ready."""
        status = self._status
        look = status.progress.look() if status.progress else None
        return pb.GetInfoResponse(
            service=status.service,
            worker_id=status.worker_id,
            generation=status.generation,
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            state=_STATES[status.state],
            waiting_for=status.waiting_for,
            epoch=status.epoch,
            model_digest=status.model_digest,
            data_address=status.data_address,
            weights_address=status.weights_address,
            metrics_address=status.metrics_address,
            model=status.model,
            dtype=status.dtype,
            quantization=status.quantization,
            loading=pb.Loading(done_bytes=look.done, total_bytes=look.total, seconds=look.seconds)
            if look
            else None,
        )

    async def GetConfig(
        self, request: pb.GetConfigRequest, context: _Context
    ) -> pb.GetConfigResponse:
        """Give the settings in force, secrets redacted."""
        async with errors_as_status(context):
            return pb.GetConfigResponse(json=json.dumps(redacted(self._settings)))

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: _Context
    ) -> pb.SetLogLevelResponse:
        """Change the least severe level that is logged."""
        async with errors_as_status(context):
            logs.set_level(request.level)
        log.info("log_level.changed", to=request.level)
        return pb.SetLogLevelResponse()

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        """Accept no new work; repeating the call changes nothing."""
        async with errors_as_status(context):
            await self._drain()
        return pb.DrainResponse()

    async def Undrain(self, request: pb.UndrainRequest, context: _Context) -> pb.UndrainResponse:
        """Accept work again; refused once the process is stopping."""
        async with errors_as_status(context):
            if self._stop.is_set():
                raise NotReady("this process is stopping", code="draining")
            if self._status.drained:
                self._status.undrain()
                for hook in self.on_drain:
                    await hook(False)
        return pb.UndrainResponse()

    async def StandBy(self, request: pb.StandByRequest, context: _Context) -> pb.StandByResponse:
        """Accept no new work, and be on standby once all work has ended; repeating the call changes nothing."""
        async with errors_as_status(context):
            await self._stand_by(True)
            return pb.StandByResponse(state=_STATES[self._status.state])

    async def Activate(self, request: pb.ActivateRequest, context: _Context) -> pb.ActivateResponse:
        """Accept work after ``StandBy``; a worker that drains continues to drain."""
        async with errors_as_status(context):
            if self._stop.is_set():
                raise NotReady("this process is stopping", code="draining")
            await self._stand_by(False)
            return pb.ActivateResponse(state=_STATES[self._status.state])

    async def Shutdown(self, request: pb.ShutdownRequest, context: _Context) -> pb.ShutdownResponse:
        """Drain, then exit; the same as SIGTERM."""
        async with errors_as_status(context):
            log.info("service.stopping", cause="Shutdown", grace_s=request.grace_s or self.grace_s)
            self.grace_s = request.grace_s or self.grace_s
            await self._drain()
            self._stop.set()
        return pb.ShutdownResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        """Give the counters and gauges of this process by name."""
        async with errors_as_status(context):
            return pb.GetStatsResponse(values=metrics.snapshot())

    async def DumpTasks(
        self, request: pb.DumpTasksRequest, context: _Context
    ) -> pb.DumpTasksResponse:
        """Give the stacks of all asyncio tasks of this loop and of all threads."""
        async with errors_as_status(context):
            return pb.DumpTasksResponse(text=_stacks())

    async def _stand_by(self, on: bool) -> None:
        status = self._status
        if status.service not in _CAN_STAND_BY:
            able = " and ".join(_CAN_STAND_BY)
            raise InvalidInput(
                "service", f"must be of {able} workers, this is the {status.service}"
            )
        if status.standing_by != on:
            status.stand_by(on)
            for hook in self.on_stand_by:
                await hook()

    async def _drain(self) -> None:
        if not self._status.drained:
            # Health shows it before any work is refused.
            self._status.set_state("draining")
            for hook in self.on_drain:
                await hook(True)


def _stacks() -> str:
    tasks = {f"task {task.get_name()}": task.get_stack() for task in asyncio.all_tasks()}
    threads = {
        f"thread {number}": list(_callers(frame)) for number, frame in sys._current_frames().items()
    }
    return "\n".join(
        "\n".join([name, *(f"  {_place(frame)}" for frame in frames)])
        for name, frames in {**tasks, **threads}.items()
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
