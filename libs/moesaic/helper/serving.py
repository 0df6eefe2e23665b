"""The helper's own side: it answers questions from its standard input, each within the limits.

The system enforces the limits, whatever the work does. A timer ends the process when its processor
time is used up, and memory beyond the bound is not given.
"""

import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from moesaic.helper.limits import HEAD, Limits, decode, encode


def serve(answer: Callable[[Any], Any], limits: Limits) -> None:
    """Answer questions until the parent closes the connection.

    ``answer`` lets ``MemoryError`` pass. Any other exception of it ends the process.
    """
    _prepare()
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        held_bytes = memory_bytes("VmSize:")
        # It is ready
        stream.write(encode({"cpu_s": time.process_time()}))
        stream.flush()
        while head := stream.read(HEAD.size):
            (length,) = HEAD.unpack(head)
            _bound_memory(held_bytes + limits.memory_bytes + limits.memory_per_byte * length)
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            try:
                told = answer(decode(stream.read(length)))
                reply = encode({"answer": told, "cpu_s": time.process_time()})
            except MemoryError:
                reply = b""
            # Its parent would not read more, and could not tell why this process ends.
            if len(reply) > HEAD.size + limits.answer_bytes:
                reply = b""
            signal.setitimer(signal.ITIMER_PROF, 0)
            _bound_memory(None)
            stream.write(reply or encode({"cpu_s": time.process_time()}))
            stream.flush()


def memory_bytes(field: str) -> int:
    """Read the memory of this process: ``VmSize:``, ``VmRSS:`` and others of ``/proc``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _prepare() -> None:
    # Where memory runs out, the system ends this process, not its parent.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # Ctrl-C in a terminal reaches both processes; the parent may still need answers, and ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _bound_memory(most: int | None) -> None:
    """Bound the memory of this process; None: by the bound that it was started with."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if most is None or (hard != resource.RLIM_INFINITY and hard < most):
        most = hard
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
