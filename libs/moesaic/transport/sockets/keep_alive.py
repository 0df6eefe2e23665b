"""The system's own probes of a connection."""

import socket

# Seconds, seconds, probes, and milliseconds that what was sent may stay unacknowledged: the system
# probes no connection that waits for an acknowledgement.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


def keep_alive(sock: socket.socket) -> None:
    """Have the system find out that the peer's machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
