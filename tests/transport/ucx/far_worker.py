"""Starts echoing workers: forks one for each line "TRANSPORTS STDERR_FILE" it reads, which prints "PID ADDRESS".

Importing torch takes seconds and forking takes none, so the tests share one of these. A request with ``flags`` 1 is
never answered. With "/" and a device behind the transports, tensors may travel apart from their frames.
"""

import asyncio
import ctypes
import os
import signal
import sys
from typing import Any

from moesaic.transport.device_memory import device_named
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.rings.plane import new_event_loop
from moesaic.transport.ucx.network import UcxNetwork


async def answer(request: Frame) -> Frame:
    if request.flags == 1:
        await asyncio.Event().wait()
    return request.reply(request.tensors, parcels=request.parcels)


async def work(transports: str, secret: bytes) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    limits = FrameLimits.of_hidden_size(4096)
    name, _, device_name = transports.partition("/")
    kind: Any = name
    device = device_named(device_name) if device_name else None
    network = UcxNetwork("far", "expert", secret, limits, transports=kind, device=device)
    print(os.getpid(), await network.listen("127.0.0.1", 0, answer), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the log
    await stop.wait()
    await network.close()


def main(secret: bytes) -> None:
    """Fork workers until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while line := sys.stdin.readline():
        transports, complaints = line.split()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
            os.dup2(os.open(complaints, os.O_WRONLY | os.O_CREAT), 2)
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(work(transports, secret))
            return


main(sys.argv[1].encode())
