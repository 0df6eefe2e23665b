"""Free and taken TCP ports of this machine."""

import socket

from moesaic.cli.terminal.outcome import CommandError, Exit


def check_port(host: str, port: int) -> None:
    """Check that a server can listen there; raises as ``hold_port``."""
    hold_port(host, port).close()


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Reserve a port until the socket is closed: the system gives it to no process that asks for a free one.

    The socket never listens. A server that allows addresses to be reused, as all services do, can
    listen on the same port.

    Args:
        host: name or address of this machine.
        port: 0 for one that is free.

    Raises:
        CommandError: no server can listen there; the text names ``--port`` or ``--host``, and a fix.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CommandError(f"--host {host}: {error.strerror}", Exit.USAGE) from error
    held = socket.socket(family, kind, protocol)
    # Past connections do not count.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(address)
    except OSError as error:
        held.close()
        if isinstance(error, PermissionError):
            fix = f"--port {port}: ports below 1024 need root; choose another"
            raise CommandError(fix) from error
        problem = error.strerror or str(error)
        raise CommandError(
            f"--port {port}: cannot listen on {host}:{port} ({problem.lower()}{_user(port)}); "
            "stop the process that uses it, or choose another port"
        ) from error
    return held


def number_of(held: socket.socket) -> int:
    """Give the number of the held port."""
    port: int = held.getsockname()[1]
    return port


def _user(port: int) -> str:
    """Name the process that listens on a port, where this user may know it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                return f" by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
    except psutil.Error:
        pass
    return ""
