"""Does the service on this machine serve? Asked every few seconds, so it imports little.

    moesaic-health [ADDRESS:PORT]

Without an argument it asks where the service listens by the variables that the service itself reads:
MOESAIC_CONTROL_HOST, else MOESAIC_HOST, and MOESAIC_ADMIN_PORT. The exit status is 0 if the service
serves; otherwise it is 1, and one line on standard error says why.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moesaic.addresses import host_port, is_address, is_everywhere, own_addresses_of

DEADLINE_S = 2.0


def main() -> NoReturn:
    """Entry point of ``moesaic-health``."""
    try:
        target = _target(sys.argv[1:], os.environ)
        fault = _fault(target)
    except ValueError as error:
        sys.exit(f"not serving: {error}")
    sys.exit(f"not serving: {target}: {fault}" if fault else 0)


def _target(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Where to ask, ``host:port``.

    Raises:
        ValueError: it is not known, or not an address of this machine yet.
    """
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise ValueError("usage: moesaic-health [ADDRESS:PORT]")
    if arguments:
        return arguments[0]
    host = environment.get("MOESAIC_CONTROL_HOST") or environment.get("MOESAIC_HOST")
    port = environment.get("MOESAIC_ADMIN_PORT") or "0"
    if not port.isdecimal() or not int(port):
        raise ValueError(f"MOESAIC_ADMIN_PORT must be the gRPC port of the service, got {port!r}")
    return host_port(_dialled(host or "127.0.0.1"), int(port))


def _dialled(host: str) -> str:
    if is_everywhere(host):
        return "::1" if ":" in host else "127.0.0.1"
    if is_address(host):
        return host
    own = own_addresses_of(host)  # others under the same name are other replicas
    if not own:
        raise ValueError(f"this machine has no address under the name {host}")
    return own[0]


def _fault(target: str) -> str:
    """What keeps the service from serving; empty if nothing does."""
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(target, options) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}".replace("\n", " ")
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"it answers {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


if __name__ == "__main__":
    main()
