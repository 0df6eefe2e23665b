"""Probe of the service on this machine, started every few seconds, so it imports little.

    moesaic-health [ADDRESS:PORT]

Without an argument it calls the address by the variables that the service itself reads:
MOESAIC_CONTROL_HOST, else MOESAIC_HOST, and MOESAIC_ADMIN_PORT. It needs no secret; where gRPC has
certificates, it shows the service's own (MOESAIC_TLS_CERT, _KEY, _CA and _NAME, or files so named).
The exit status is 0 if the service serves; otherwise it is 1, and one line on standard error says why.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moesaic.addresses import host_port, is_address, is_everywhere, own_addresses_of
from moesaic.cluster.security.tls import read_tls
from moesaic.loopback import plain_host
from moesaic.usage.variables import told

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
    """Find the ``host:port`` to call.

    Raises:
        ValueError: it is unknown, or not an address of this machine yet.
    """
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise ValueError("usage: moesaic-health [ADDRESS:PORT]")
    if arguments:
        return arguments[0]
    host = environment.get("MOESAIC_CONTROL_HOST") or environment.get("MOESAIC_HOST")
    port = environment.get("MOESAIC_ADMIN_PORT") or "0"
    if not port.isdecimal() or not int(port):
        raise ValueError(f"MOESAIC_ADMIN_PORT must be the gRPC port of the service, got {port!r}")
    return host_port(_dialled(plain_host(host or "127.0.0.1")), int(port))


def _dialled(host: str) -> str:
    if is_everywhere(host):
        return "::1" if ":" in host else "127.0.0.1"
    if is_address(host):
        return host
    # Others under the same name are other replicas.
    own = own_addresses_of(host)
    if not own:
        raise ValueError(f"this machine has no address under the name {host}")
    return own[0]


def _fault(target: str) -> str:
    """Ask the service, and name the fault; empty if it serves."""
    with _connection(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}".replace("\n", " ")
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"it answers {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _connection(target: str) -> grpc.Channel:
    """Open a channel with the service's own certificates, if it has any.

    Raises:
        ValueError: a certificate cannot be read.
    """
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    tls = read_tls(*(told(f"tls_{part}") for part in ("cert", "key", "ca", "name")))
    if tls is None:
        return grpc.insecure_channel(target, options)
    options += tls.channel_options
    return grpc.secure_channel(target, tls.channel_credentials(), options)


if __name__ == "__main__":
    main()
