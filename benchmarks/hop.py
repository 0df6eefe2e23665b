"""Time of one layer exchange: a request of hidden states to another process, a reply of the same shape.

It is that of ``await network.exchange(...)`` in an asyncio loop against a server whose handler runs in its own
asyncio loop in another process: encoding, checksums, event loops and scheduling included. Beside it stands the floor: a
blocking Unix-socket ping-pong of the same bytes between two processes.
"""

import asyncio
import itertools
import logging
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import structlog
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.turns import spread
from moesaic.errors import MoesaicError
from moesaic.transport.contract import Network
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.planes import Transports

HIDDEN = 256
ROWS = (1, 4, 16, 64, 256)
ROWS_OF_4_KB = 4
LIMITS = FrameLimits.of_hidden_size(HIDDEN)
SECRET = b"benchmark"
DEADLINE_S = 10.0
MAIN_WAY = "rings"  # what a disaggregated suite on one host uses
# Between hosts a suite uses sockets; TCP by UCX is what it used before, and is for private networks.
TRANSPORTS: dict[str, Transports] = {
    "rings": "ring",
    "sockets": "socket",
    "ucx_shared_memory": "shm",
    "ucx_tcp": "tcp",
}
_LENGTH = struct.Struct("<Q")

Hop = Callable[[int], Awaitable[None]]  # one exchange of so many rows


def run(quick: bool) -> dict[str, Any]:
    """Measure every way and size, interleaved, so that drift of the machine meets all of them alike."""
    rounds, per_round = (3, 60) if quick else (10, 200)
    samples = asyncio.run(_measure(rounds, per_round))
    figures: dict[str, Any] = {
        "rtt_us_p50": _quantile(samples[MAIN_WAY][ROWS_OF_4_KB], 0.5),
        "rtt_us_p99": _quantile(samples[MAIN_WAY][ROWS_OF_4_KB], 0.99),
    }
    for way, by_rows in samples.items():
        figures[way] = {
            f"{rows}_rows": {
                "rtt_us_p50": _quantile(times, 0.5),
                "rtt_us_p99": _quantile(times, 0.99),
                "rtt_us_p50_of_rounds": _of_rounds(times, per_round),
            }
            for rows, times in by_rows.items()
        }
    return {
        "config": {
            "hidden_size": HIDDEN,
            "dtype": "float32",
            "rows": list(ROWS),
            "rounds": rounds,
            "exchanges_per_round": per_round,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": figures,
        "notes": [
            f"rtt_us_p50 and rtt_us_p99 at the top: {ROWS_OF_4_KB} rows (4 KB) each way, {MAIN_WAY}",
            "unix_socket: blocking ping-pong of the same payload, no frame, no event loop: the floor",
            *(["quick: fewer rounds, the same code path"] if quick else []),
        ],
    }


async def _measure(rounds: int, per_round: int) -> dict[str, dict[int, list[float]]]:
    async with AsyncExitStack() as stack:
        ways: dict[str, Hop] = {
            "in_process": await stack.enter_async_context(_in_process()),
            **{
                way: await stack.enter_async_context(_between_processes(transports))
                for way, transports in TRANSPORTS.items()
            },
            "unix_socket": await stack.enter_async_context(_unix_socket()),
        }
        samples: dict[str, dict[int, list[float]]] = {way: {r: [] for r in ROWS} for way in ways}
        # The first one warms up.
        for round_idx in range(-1, rounds):
            for rows in ROWS:
                for way, hop in ways.items():
                    times = await _timed(hop, rows, per_round)
                    if round_idx >= 0:
                        samples[way][rows] += times
        return samples


async def _timed(hop: Hop, rows: int, count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await hop(rows)
        times.append((time.perf_counter() - started) * 1e6)
    return times


@asynccontextmanager
async def _in_process() -> AsyncIterator[Hop]:
    hub = Hub()
    near = InProcessNetwork("near", SECRET, LIMITS, hub)
    far = InProcessNetwork("far", SECRET, LIMITS, hub)
    yield await _hop_over(near, await far.listen("here", 0, _echo))
    await near.close()
    await far.close()


@asynccontextmanager
async def _between_processes(transports: Transports) -> AsyncIterator[Hop]:
    near = UcxNetwork("near", "attention", SECRET, LIMITS, transports=transports)
    with _process(_serve_frames, transports) as far:
        yield await _hop_over(near, far.recv())
        await near.close()


@asynccontextmanager
async def _unix_socket() -> AsyncIterator[Hop]:
    with _process(_serve_bytes) as far:
        # The pipe to it is a Unix socket pair.
        near = socket.socket(fileno=os.dup(far.fileno()))
        payloads = {rows: bytes(rows * HIDDEN * 4) for rows in ROWS}

        async def hop(rows: int) -> None:
            near.sendall(_LENGTH.pack(len(payloads[rows])) + payloads[rows])
            _receive(near, len(payloads[rows]))

        with near:
            yield hop
            near.sendall(_LENGTH.pack(0))


async def _hop_over(near: Network, address: str) -> Hop:
    link = await near.connect(address, "far", DEADLINE_S)
    hidden = {rows: torch.randn(rows, HIDDEN) for rows in ROWS}
    seqs = itertools.count(1)

    async def hop(rows: int) -> None:
        request = Frame(kind=FrameKind.REQUEST, seq=next(seqs), tensors=[hidden[rows]])
        (reply,) = await near.exchange([(link, request)], DEADLINE_S)
        if isinstance(reply, MoesaicError):
            raise reply

    return hop


async def _echo(request: Frame) -> Frame:
    return request.reply(request.tensors)


@contextmanager
def _process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run ``target(pipe, *args)`` in another process; any message to it tells it to end."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(DEADLINE_S)
        process.kill()


def _serve_frames(pipe: Connection, transports: Transports) -> None:
    async def serve() -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        torch.set_num_threads(1)
        far = UcxNetwork("far", "expert", SECRET, LIMITS, transports=transports)
        pipe.send(await far.listen("127.0.0.1", 0, _echo))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        await far.close()

    asyncio.run(serve())


def _serve_bytes(pipe: Connection) -> None:
    with socket.socket(fileno=os.dup(pipe.fileno())) as far:
        while nbytes := _LENGTH.unpack(_receive(far, _LENGTH.size))[0]:
            far.sendall(_receive(far, nbytes))


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    received = sock.recv(nbytes, socket.MSG_WAITALL)
    if len(received) < nbytes:
        raise ConnectionResetError("the other process ended")
    return received


def _quantile(times: list[float], fraction: float) -> float:
    return round(sorted(times)[int(len(times) * fraction)], 1)


def _of_rounds(times: list[float], per_round: int) -> dict[str, float]:
    """Report the medians of rounds."""
    medians = [
        _quantile(times[start : start + per_round], 0.5)
        for start in range(0, len(times), per_round)
    ]
    return spread(medians, 1)
