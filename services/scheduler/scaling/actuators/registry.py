"""The actuators by name; each is imported when it is wanted."""

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Fleet
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.contract import Actuator
from moesaic.services.scheduler.settings import SchedulerSettings


def actuator_of(
    settings: SchedulerSettings, bus: Bus, fleet: Fleet, view: PlacementView
) -> Actuator:
    """Make the actuator that settings name."""
    most = FleetShape(settings.scaling_max_attention, settings.scaling_max_experts)
    if settings.scaling_actuator == "compose":
        from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator

        return ComposeActuator(
            settings.scaling_compose_socket, settings.scaling_compose_project, most=most
        )
    if settings.scaling_actuator == "kubernetes":
        from moesaic.services.scheduler.scaling.actuators.kubernetes import KubernetesActuator

        return KubernetesActuator(most=most)
    from moesaic.services.scheduler.scaling.actuators.standby import StandbyActuator

    return StandbyActuator(bus, fleet, view)
