"""Workers as containers of a compose project, on the engine of one host."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from moesaic.errors import InvalidInput
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.engine import Container, ContainerEngine
from moesaic.services.scheduler.scaling.actuators.http_api import HttpApi

log = structlog.get_logger()

SERVICES: Mapping[str, str] = {"attention": "attention", "experts": "expert"}
_LATE_S = 30.0  # over a container's own time for stopping, until it is told again


class ComposeActuator:
    """Adds copies of a service's containers, and stops those that do not work, then the newest ones.

    All state is read from the engine, so a later leader continues where this one stopped. A
    container that was told to stop is renamed, and is not told again. The last container of a
    service is kept after it has stopped, as the source of copies.

    Args:
        socket: address of the engine, ``unix:///var/run/docker.sock`` or ``tcp://host:port``.
        project: name of the compose project; containers of others are not touched.
        services: name of the compose service of each side.
        most: the largest shape that this host carries.
        clock: monotonic seconds.

    Raises:
        InvalidInput: ``socket`` or ``project`` is malformed.
    """

    name = "compose"

    def __init__(
        self,
        socket: str,
        project: str,
        services: Mapping[str, str] = SERVICES,
        *,
        most: FleetShape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not project:
            raise InvalidInput("scaling_compose_project", "must name the compose project")
        api = HttpApi("the container engine", socket, setting="scaling_compose_socket")
        self._engine, self._project = ContainerEngine(api, project), project
        self._services, self._most, self._clock = dict(services), most, clock
        # By service, then by the id of a container that leaves: the time from which it is late.
        self._late_at: dict[str, dict[str, float]] = {}

    async def most(self) -> FleetShape:
        """Return the shape that operators gave, once the engine has answered.

        Raises:
            NotReady: the engine cannot be reached.
        """
        for service in self._services.values():
            await self._engine.containers(service)
        return self._most

    async def intended(self) -> FleetShape:
        """Count the containers that run and were not told to stop.

        Raises:
            NotReady: the engine cannot be reached.
        """
        found = {
            side: len(_serving(await self._engine.containers(service)))
            for side, service in self._services.items()
        }
        return FleetShape(**found)

    async def apply(self, wanted: FleetShape) -> None:
        """Begin to reach ``wanted``; containers start and stop on their own.

        Raises:
            InvalidInput: no container of a service is there to copy; names the setting.
            NotReady: the engine cannot be reached, or refuses.
        """
        for side, service in self._services.items():
            await self._bring(service, getattr(wanted, side))

    async def _bring(self, service: str, num_wanted: int) -> None:
        found = await self._engine.containers(service)
        serving = _serving(found)
        await self._see_off(service, [c for c in found if c.runs and c.leaving])
        if len(serving) > num_wanted:
            ended = serving[num_wanted:]
            told = await asyncio.gather(*(self._engine.stop(c) for c in ended))
            names = [c.name for c, by_us in zip(ended, told, strict=True) if by_us]
            if names:
                log.info("containers.stopping", service=service, containers=names)
        resting = [c for c in found if c.state in ("created", "exited")]
        num_missing = max(0, num_wanted - len(serving))
        started, rest = resting[:num_missing], resting[num_missing:]
        for container in started:
            await self._engine.start(container)
        await self._add(service, found, num_missing - len(started))
        gone = [c for c in rest if c.leaving]
        # One is kept to copy from.
        for container in gone[int(len(gone) == len(found)) :]:
            await self._engine.remove(container)

    async def _add(self, service: str, found: list[Container], num_new: int) -> None:
        if num_new <= 0:
            return
        if not found:
            raise InvalidInput(
                "scaling_compose_project",
                f"project {self._project!r} has no container of service {service!r} to copy: "
                "start one with docker compose up, or name the project it belongs to",
            )
        first = found[-1].number + 1
        for number in range(first, first + num_new):
            await self._engine.copy(found[-1], service, number)
        log.info("containers.added", service=service, first=first, num_added=num_new)

    async def _see_off(self, service: str, leaving: list[Container]) -> None:
        """Tell those again that should have ended long ago.

        Their scheduler may have died before it told them: the engine shows only that it was about to.
        """
        before = self._late_at.get(service, {})
        late_at: dict[str, float] = {}
        for container in leaving:
            at = before.get(container.id)
            if at is not None and self._clock() >= at:
                log.warning("container.late", container=container.name)
                await self._engine.stop_again(container)
                at = None
            if at is None:
                at = self._clock() + await self._engine.stop_timeout_s(container) + _LATE_S
            late_at[container.id] = at
        self._late_at[service] = late_at


def _serving(found: Iterable[Container]) -> list[Container]:
    """List those that run for good, the last to go first: those that work, then by number, as compose counts."""
    return sorted(
        (c for c in found if c.runs and not c.leaving), key=lambda c: (not c.works, c.number)
    )
