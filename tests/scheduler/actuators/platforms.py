"""What actuators work with, as tests see it: one attention worker and two expert workers, and room for more."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from moesaic.cluster.registry import Fleet, registered
from moesaic.cluster.rpc.server import admin_server
from moesaic.messages.registry import Role, WorkerRecord
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator
from moesaic.services.scheduler.scaling.actuators.contract import Actuator
from moesaic.services.scheduler.scaling.actuators.kubernetes import KubernetesActuator
from moesaic.services.scheduler.scaling.actuators.standby import StandbyActuator
from moesaic.settings import ServiceSettings
from moesaic.v1 import attention_pb2, attention_pb2_grpc
from tests.redis_servers import RedisServers
from tests.scheduler.actuators.fake_cluster import cluster_in
from tests.scheduler.actuators.fake_engine import engine_at
from tests.scheduler.conftest import Suite, control_plane

THERE, MOST = FleetShape(1, 2), FleetShape(3, 4)


class Platform(Protocol):
    """A place where workers run."""

    busy: bool  # workers that are to leave go on with their requests

    def actuator(self) -> Actuator:
        """One of one more scheduler."""
        ...

    def changes(self) -> list[str]:
        """What workers or the place were told so far."""
        ...

    async def fail(self) -> None:
        """Take no orders from now on."""
        ...

    async def recover(self) -> None:
        """Take orders again."""
        ...


class _Engine:
    def __init__(self, socket: Path, engine: Any) -> None:
        self._socket, self._engine = socket, engine
        for service, number in (("attention", 1), ("expert", 1), ("expert", 2)):
            engine.add(service, number)
        self._first = set(engine.containers)

    @property
    def busy(self) -> bool:
        return bool(self._engine.drains)

    @busy.setter
    def busy(self, busy: bool) -> None:
        self._engine.drains = busy

    def actuator(self) -> Actuator:
        return ComposeActuator(f"unix://{self._socket}", "suite", most=MOST)

    def changes(self) -> list[str]:
        added = [f"run {each}" for each in self._engine.containers if each not in self._first]
        signals = self._engine.signals.items()
        return added + [f"stop {each}" for each, number in signals for _ in range(number)]

    async def fail(self) -> None:
        self._engine.refusal = "no space left on device"

    async def recover(self) -> None:
        self._engine.refusal = ""


class _Cluster:
    busy = False  # the API server never waits for a pod

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def actuator(self) -> Actuator:
        return KubernetesActuator(
            most=MOST,
            api_url=self._cluster.url,
            token_file=self._cluster.token_file,
            ca_file=self._cluster.ca_file,
        )

    def changes(self) -> list[str]:
        return [f"{name}: {replicas}" for name, replicas in self._cluster.patches]

    async def fail(self) -> None:
        self._cluster.may_scale = False

    async def recover(self) -> None:
        self._cluster.may_scale = True


class _Registry:
    busy = False

    def __init__(self, control: Suite) -> None:
        self._control, self._told = control, list[str]()
        self._fleet = Fleet()

    def actuator(self) -> Actuator:
        return StandbyActuator(self._control.bus, self._fleet, self._control.view)

    def changes(self) -> list[str]:
        return list(self._told)

    async def fail(self) -> None:
        self._control.redis.kill()

    async def recover(self) -> None:
        await self._control.restart_redis()

    @asynccontextmanager
    async def worker(self, role: Role, number: int, *, active: bool) -> AsyncIterator[None]:
        """Run one that does what it is told, and says so in the registry."""
        name = f"{role}-{number}"
        settings, register = ServiceSettings(), _load_of_nobody
        async with admin_server(settings, role, worker_id=name, register=register) as admin:
            status = admin.status
            status.stand_by(not active)
            status.set_state("ready")
            record = WorkerRecord(
                worker_id=name,
                generation=1,
                role=role,
                state=status.state,
                standing_by=status.standing_by,
                admin_address=admin.address,
                **(_EXPERTS if role == "expert" else {}),
            )
            async with registered(self._control.bus, record) as lease:

                async def obey() -> None:
                    self._told.append(f"{name}: {'stand by' if status.standing_by else 'work'}")
                    status.rest(status.standing_by and not self.busy)
                    await lease.update(state=status.state, standing_by=status.standing_by)
                    await self._fleet.refresh(self._control.bus)

                admin.on_stand_by(obey)
                yield

    @asynccontextmanager
    async def populated(self) -> AsyncIterator["_Registry"]:
        async with AsyncExitStack() as workers:
            for role, there, most in (
                ("attention", THERE.attention, MOST.attention),
                ("expert", THERE.experts, MOST.experts),
            ):
                for number in range(most):
                    worker = self.worker(role, number, active=number < there)  # type: ignore[arg-type]
                    await workers.enter_async_context(worker)
            await self._fleet.refresh(self._control.bus)
            yield self


# One worker has room for every expert.
_EXPERTS: dict[str, Any] = {
    "model_digest": "m",
    "slots_per_layer": 8,
    "num_experts": 8,
    "layers": [0],
}


class _NoLoad(attention_pb2_grpc.AttentionServiceServicer):
    async def GetLoad(self, request: Any, context: Any) -> attention_pb2.GetLoadResponse:
        return attention_pb2.GetLoadResponse()


def _load_of_nobody(server: Any) -> None:
    attention_pb2_grpc.add_AttentionServiceServicer_to_server(_NoLoad(), server)


@asynccontextmanager
async def _compose(redis_servers: RedisServers, directory: Path) -> AsyncIterator[Platform]:
    with engine_at(directory / "engine.sock") as engine:
        yield _Engine(directory / "engine.sock", engine)


@asynccontextmanager
async def _kubernetes(redis_servers: RedisServers, directory: Path) -> AsyncIterator[Platform]:
    with cluster_in(directory / "account") as cluster:
        yield _Cluster(cluster)


@asynccontextmanager
async def _standby(redis_servers: RedisServers, directory: Path) -> AsyncIterator[Platform]:
    async with (
        control_plane(redis_servers) as control,
        _Registry(control).populated() as registry,
    ):
        yield registry


PLATFORMS: dict[str, Callable[[RedisServers, Path], Any]] = {
    "standby": _standby,
    "compose": _compose,
    "kubernetes": _kubernetes,
}
