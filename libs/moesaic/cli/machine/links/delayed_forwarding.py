"""Latency for kernels without ``netem``: forwards frames between ports of one namespace, each after a delay.

It stands in for the bridge of a switch. Rates stay the kernel's: frames come here through the queue of
the host's end, and leave through that of the port. Segments stay as large as the kernel makes them, so
that one process keeps up with a Gbit/s.
"""

import ctypes
import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_ETH_P_ALL, _SOL_PACKET = 3, 263
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23  # of linux/if_packet.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HEADER = 10  # bytes of a virtio_net_hdr, before every frame
_BUFFER = 64 << 20
_AT_ONCE = 64  # frames that are taken from a port before others have their turn


def open_port(name: str) -> socket.socket:
    """All that comes in at a port, and a way out of it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    port.bind((name, 0))
    return port


def forward(ports: list[socket.socket], delay_s: float) -> None:
    """Forward for ever: to the port where an address was seen, or to all others."""
    seen: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # in order: all wait equally long
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], left_s)[0]:
            due_s = time.monotonic() + delay_s
            for _ in range(_AT_ONCE):
                try:
                    frame = port.recv(1 << 18, socket.MSG_DONTWAIT)
                except OSError:  # nothing waits, or the cable is cut
                    break
                target, source = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
                seen[source] = port
                outs = [seen[target]] if target in seen else [p for p in ports if p is not port]
                waiting.extend((due_s, out, frame) for out in outs)
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, out, frame = waiting.popleft()
            # The queue is full: dropped, as a switch does.
            with suppress(OSError):
                out.send(frame)


def main() -> None:
    """Arguments: the namespace, the delay in milliseconds, ports. Says "ready" once it forwards."""
    namespace, delay_ms, *names = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    # PR_SET_PDEATHSIG: never outlive who started it.
    libc.prctl(1, 9)
    with Path(f"/run/netns/{namespace}").open("rb") as entered:
        if libc.setns(entered.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # A link does not wait for a processor.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = [open_port(name) for name in names]
    print("ready", flush=True)
    forward(ports, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
