"""Free and taken TCP ports of this machine."""

import socket
from contextlib import ExitStack

from moesaic.cli.outcome import CommandError, Exit
from moesaic.cli.suite import LOOPBACK


def free_ports(count: int) -> list[int]:
    """``count`` different loopback ports that are free now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind((LOOPBACK, 0))
        return [free.getsockname()[1] for free in sockets]


def check_port(host: str, port: int) -> None:
    """Make sure that a server can listen there.

    Raises:
        CommandError: naming ``--port`` or ``--host``, and what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CommandError(f"--host {host}: {error.strerror}", Exit.USAGE) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do; past connections do not count
        try:
            probe.bind(address)
        except PermissionError as error:
            raise CommandError(
                f"--port {port}: ports below 1024 need root; give another"
            ) from error
        except OSError as error:
            problem = error.strerror or str(error)
            raise CommandError(
                f"--port {port}: cannot listen on {host}:{port} ({problem.lower()}{_user(port)}); "
                "stop what uses it, or give another"
            ) from error


def _user(port: int) -> str:
    """Who listens on a port, where this user may know it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                return f" by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
    except psutil.Error:
        pass
    return ""
