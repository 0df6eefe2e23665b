"""Thousands of idle streams: their survival, their cost, and the other requests that the gateway serves meanwhile."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gateway.process import GatewayProcess, gateway_process, instant_worker
from moesaic.cli.load.connection import Connection, encoded, request

CLUSTER = "bench-held"
PATH = "/v1/completions"
WITHIN_S = 60.0
OPENING = 50  # connections that are being opened at a time
PROBES = 100
HELD = request(PATH, encoded({"prompt": "Once upon a time", "max_tokens": 2, "stream": True}))
PROBE = encoded({"prompt": "Once upon a time", "max_tokens": 1})


async def held_streams(redis_url: str, count: int) -> dict[str, Any]:
    """Open ``count`` streams, send other requests meanwhile, hang up.

    Returns:
        Figures of the gateway's process.
    """
    flags = ["--cluster", CLUSTER, "--max-inflight", str(2 * count)]
    async with (
        instant_worker(redis_url, CLUSTER) as (worker, _),
        gateway_process(redis_url, *flags) as gateway,
    ):
        await gateway.until("/readyz")
        probe = await Connection.open(gateway.port)
        before = await _state(gateway, probe)
        started = time.perf_counter()
        streams = await _opened(gateway.port, count)
        await _until(lambda: worker.num_waiting == count)
        opened_s = time.perf_counter() - started
        kept = sum(await asyncio.gather(*(_kept(stream) for stream in streams)))
        during = await _state(gateway, probe)
        for stream in streams:
            stream.close()
        await _until(lambda: worker.num_waiting == 0)
        after = await _state(gateway, probe)
        probe.close()
    return {
        "streams": count,
        "kept": kept,
        "opened_per_s": round(count / opened_s, 0),
        "resident_kb_per_stream": _each(before, during, "resident_kb", count),
        "files_per_stream": _each(before, during, "files", count),
        "files_left": after["files"] - before["files"],
        "resident_kb_left_per_stream": _each(before, after, "resident_kb", count),
        "other_request_ms": {"before": before["request_ms"], "meanwhile": during["request_ms"]},
        "gateway_resident_mb": round(before["resident_kb"] / 1024, 1),
    }


async def _opened(port: int, count: int) -> list[Connection]:
    """Open streams, each with its request sent."""
    turn = asyncio.Semaphore(OPENING)

    async def opened() -> Connection:
        async with turn:
            connection = await Connection.open(port)
            connection.send(HELD)
            return connection

    return await asyncio.gather(*(opened() for _ in range(count)))


async def _kept(stream: Connection) -> bool:
    """True if the stream begins, and shows a sign of life."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return await stream.begun() == 200 and b"keep-alive" in await stream.part()
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return False


async def _state(gateway: GatewayProcess, probe: Connection) -> dict[str, Any]:
    times = []
    for _ in range(PROBES):
        started = time.perf_counter()
        status, body = await probe.post(PATH, PROBE)
        times.append(time.perf_counter() - started)
        if status != 200:
            raise RuntimeError(f"{status}: {body!r}")
    quantiles = statistics.quantiles(times, n=100)
    return {
        "resident_kb": gateway.resident_bytes / 1024,
        "files": gateway.num_files,
        "request_ms": {
            "p50": round(quantiles[49] * 1e3, 2),
            "p99": round(quantiles[98] * 1e3, 2),
        },
    }


def _each(first: dict[str, Any], second: dict[str, Any], what: str, count: int) -> float:
    return round(float(second[what] - first[what]) / count, 2)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  # others' counts have no event
            await asyncio.sleep(0.01)
