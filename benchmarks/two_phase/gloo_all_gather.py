"""Measurement of ``torch.distributed`` with gloo for phase 1: ``python -m benchmarks.two_phase.gloo_all_gather``.

Two processes, as two attention workers of one node. Measured: forming a group, an all-gather of rows
and the same rows as frames over our links in shared memory, and what a member finds when the other is
killed or stopped in the middle.
"""

import asyncio
import multiprocessing
import os
import signal
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from benchmarks.hop import _between_processes

dist: Any = torch.distributed  # it exports more than it says
HIDDEN, ROWS, COUNT = 256, (4, 64, 256), 200
TIMEOUT_S = 2.0


def form(rank: int, port: int, epoch: int) -> Any:
    """A group of two, made without a default group; a new prefix for each membership."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=30))
    prefixed = dist.PrefixStore(f"epoch-{epoch}", store)
    group = dist.ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=TIMEOUT_S))
    return store, group


def gather(group: Any, rows: torch.Tensor) -> None:
    """An all-gather, waited for."""
    group.allgather([[torch.empty_like(rows) for _ in range(2)]], [rows]).wait()


def member(rank: int, port: int, pipe: Connection) -> None:
    """Gather with the other one, then wait to be killed or, as rank 0, tell what is found."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    _store, group = form(rank, port, 0)
    formed_s = time.perf_counter() - started
    times: dict[int, list[float]] = {}
    for rows in ROWS:
        hidden = torch.randn(rows, HIDDEN)
        for _ in range(COUNT):
            started = time.perf_counter()
            gather(group, hidden)
            times.setdefault(rows, []).append(time.perf_counter() - started)
    pipe.send({"form_s": formed_s, "gather_s": {r: statistics.median(t) for r, t in times.items()}})
    pipe.recv()  # the other one has been dealt with
    if rank == 0:
        started, cause = time.perf_counter(), "nothing"
        try:
            gather(group, torch.randn(4, HIDDEN))
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
        pipe.send({"after_s": time.perf_counter() - started, "cause": cause[:160]})
    else:
        time.sleep(60)
    os._exit(0)


def run(signal_number: int, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two members, of which the second gets the signal."""
    spawn = multiprocessing.get_context("spawn")
    pipes, members = [], []
    for rank in range(2):
        here, there = spawn.Pipe()
        process = spawn.Process(target=member, args=(rank, port, there), daemon=True)
        process.start()
        pipes.append(here)
        members.append(process)
    found, _ = (pipe.recv() for pipe in pipes)
    os.kill(members[1].pid or 0, signal_number)
    time.sleep(0.2)
    pipes[0].send("go on")
    outcome = pipes[0].recv()
    for process in members:
        process.kill()
        process.join()
    return found, outcome


async def links() -> dict[int, float]:
    """Rows to another process over shared memory and as many back: a trip to the lead."""
    async with _between_processes("shm") as hop:
        found = {}
        for rows in ROWS:
            times = []
            for _ in range(COUNT):
                started = time.perf_counter()
                await hop(rows)
                times.append(time.perf_counter() - started)
            found[rows] = statistics.median(times)
        return found


def main() -> None:
    """Print what is measured."""
    killed = run(signal.SIGKILL, 29651)
    stopped = run(signal.SIGSTOP, 29652)
    trips = asyncio.run(links())
    print(
        f"forming a group: {1e3 * killed[0]['form_s']:.1f} ms, {1e3 * stopped[0]['form_s']:.1f} ms"
    )
    for rows in ROWS:
        print(
            f"{rows} rows of {HIDDEN}: all-gather {1e6 * killed[0]['gather_s'][rows]:.0f} us, "
            f"{1e6 * stopped[0]['gather_s'][rows]:.0f} us; over a link and back {1e6 * trips[rows]:.0f} us"
        )
    for what, outcome in (("killed", killed[1]), ("stopped", stopped[1])):
        print(f"other member {what}: after {1e3 * outcome['after_s']:.0f} ms: {outcome['cause']}")


if __name__ == "__main__":
    main()
