"""The scope that a caller needs, for every method of every service.

=========  ===================================================================================
``open``   needs no token: the health check, for probes without a secret; not its stream
``data``   serving and looking: changes nothing about a service's work for others
``admin``  everything; also reflection and channelz, which reveal how a service is built
=========  ===================================================================================
"""

from typing import Literal

Scope = Literal["data", "admin"]

_OPEN = "open"
_BY_SERVICE: dict[str, dict[Literal["data", "admin", "open"], str]] = {
    "grpc.health.v1.Health": {"open": "Check", "data": "Watch"},
    "grpc.channelz.v1.Channelz": {
        "admin": "GetChannel GetServer GetServers GetServerSockets GetSocket GetSubchannel "
        "GetTopChannels"
    },
    "grpc.reflection.v1alpha.ServerReflection": {"admin": "ServerReflectionInfo"},
    "moesaic.v1.AdminService": {
        "data": "GetInfo GetStats",
        "admin": "GetConfig SetLogLevel Drain Undrain StandBy Activate Shutdown DumpTasks",
    },
    "moesaic.v1.AttentionService": {"data": "Execute GetLoad", "admin": "RecordTrace"},
    "moesaic.v1.ExpertService": {
        "data": "ListSlots",
        "admin": "PreparePlacement CommitPlacement AbortPlacement GetActivations",
    },
    "moesaic.v1.EdgeAgentService": {"data": "GetProfile", "admin": "SetMemoryLimit"},
    "moesaic.v1.RankStoreService": {"admin": "Set Get Add Delete Stay"},
    "moesaic.v1.GatewayService": {"data": "GetRouter", "admin": "SetPolicy"},
    "moesaic.v1.SchedulerService": {
        "data": "GetPlacement WatchPlacement GetFleet",
        "admin": "Plan ApplyPlacement SetPolicy SetBrownout GetBrownout GetDecisions GetActivations "
        "Scale SetScaling GetScaling",
    },
}
METHODS: dict[str, str] = {
    f"/{service}/{method}": scope
    for service, methods_by_scope in _BY_SERVICE.items()
    for scope, methods in methods_by_scope.items()
    for method in methods.split()
}


def scope_of(method: str) -> Scope | None:
    """Look up the scope that a call of ``method``, ``/package.Service/Method``, needs; None if open.

    A method that is not in the table needs ``admin``.
    """
    scope = METHODS.get(method, "admin")
    return None if scope == _OPEN else ("data" if scope == "data" else "admin")


def allows(held: str, needed: Scope) -> bool:
    """True if the scope ``held`` includes ``needed``."""
    return held in ("admin", needed)
