"""The actuators by name; each is imported when it is wanted."""

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Fleet
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.contract import Actuator
from moesaic.services.scheduler.settings import ActuatorName, SchedulerSettings


@dataclass(frozen=True)
class ActuatorParts:
    """Parts of the scheduler that actuators are made from."""

    settings: SchedulerSettings
    bus: Bus
    fleet: Fleet
    view: PlacementView


def _standby(parts: ActuatorParts) -> Actuator:
    from moesaic.services.scheduler.scaling.actuators.standby import StandbyActuator

    return StandbyActuator(parts.bus, parts.fleet, parts.view)


def _compose(parts: ActuatorParts) -> Actuator:
    from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator

    settings = parts.settings
    return ComposeActuator(
        settings.scaling_compose_socket, settings.scaling_compose_project, most=_most(settings)
    )


def _kubernetes(parts: ActuatorParts) -> Actuator:
    from moesaic.services.scheduler.scaling.actuators.kubernetes import KubernetesActuator

    return KubernetesActuator(most=_most(parts.settings))


def _most(settings: SchedulerSettings) -> FleetShape:
    return FleetShape(settings.scaling_max_attention, settings.scaling_max_experts)


ACTUATORS: dict[ActuatorName, Callable[[ActuatorParts], Actuator]] = {
    "standby": _standby,
    "compose": _compose,
    "kubernetes": _kubernetes,
}
