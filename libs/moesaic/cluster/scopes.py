"""What a caller must be allowed to do, for every method of every service.

``data`` is what serving takes, and looking: nothing it allows changes what a service does for
others. ``admin`` allows everything. The question of health is open, for probes that know no secret,
but nobody unknown holds a call open to hear of its changes. What tells how a service is built,
reflection and channelz, is for operators.
"""

from typing import Literal, get_args

Scope = Literal["data", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

_OPEN = "open"
_BY_SERVICE: dict[str, dict[Literal["data", "admin", "open"], str]] = {
    "grpc.health.v1.Health": {"open": "Check", "data": "List Watch"},
    "grpc.channelz.v1.Channelz": {
        "admin": "GetChannel GetServer GetServers GetServerSockets GetSocket GetSubchannel "
        "GetTopChannels"
    },
    "grpc.reflection.v1alpha.ServerReflection": {"admin": "ServerReflectionInfo"},
    "moesaic.v1.AdminService": {
        "data": "GetInfo GetStats",
        "admin": "GetConfig SetLogLevel Drain Undrain Shutdown DumpTasks",
    },
    "moesaic.v1.AttentionService": {"data": "Execute GetLoad", "admin": "RecordTrace"},
    "moesaic.v1.ExpertService": {
        "data": "ListSlots",
        "admin": "PreparePlacement CommitPlacement AbortPlacement GetActivations",
    },
    "moesaic.v1.GatewayService": {"data": "GetRouter", "admin": "SetPolicy"},
    "moesaic.v1.SchedulerService": {
        "data": "GetPlacement WatchPlacement GetFleet",
        "admin": "Plan ApplyPlacement SetPolicy GetDecisions GetActivations",
    },
}
METHODS: dict[str, str] = {
    f"/{service}/{method}": scope
    for service, methods_by_scope in _BY_SERVICE.items()
    for scope, methods in methods_by_scope.items()
    for method in methods.split()
}


def scope_of(method: str) -> Scope | None:
    """The scope that a call of ``method``, ``/package.Service/Method``, needs; None if none.

    A method that is not in the table needs ``admin``.
    """
    scope = METHODS.get(method, "admin")
    return None if scope == _OPEN else ("data" if scope == "data" else "admin")


def allows(held: str, needed: Scope) -> bool:
    """Whether a caller with the scope ``held`` may do what needs ``needed``."""
    return held in ("admin", needed)
