"""Measure for how long one body holds the gateway's event loop, endpoint by endpoint.

Each endpoint gets bodies up to the limit, full of one thing each (``bodies``). Meanwhile another
process asks ``/livez`` without a pause. Its longest wait shows how long the loop was blocked, but
includes other load of the machine. So bodies with long waits are sent again, and the best of a few
tries counts.
"""

import asyncio
import heapq
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gateway.process import gateway_process, instant_worker
from benchmarks.refusals.bodies import BodyLimits, large_bodies
from benchmarks.refusals.forms import FILES, large_forms
from moesaic.cli.load.connection import Connection, request
from moesaic.cluster.redis.child import start_redis
from moesaic.json_texts import MAX_NESTED, MAX_TEXTS, MAX_VALUES
from moesaic.services.gateway.app import body_types
from moesaic.services.gateway.settings import GatewaySettings

CLUSTER = "bench-refusals"
MAX_BYTES: int = GatewaySettings.model_fields["max_body_bytes"].default
LIMITS = BodyLimits(MAX_BYTES, MAX_VALUES, MAX_TEXTS, MAX_NESTED)
MOST_MS = 50.0
WORTH_A_TRY_MS = 15.0
TRIES = 3
QUICK_END = ["--request-timeout-s", "10"]  # no body needs it
EVERY = 12  # one body of so many, where it has to be quick
NUM_TOLD = 3


@dataclass(order=True)
class Held:
    """The wait that a body made."""

    held_ms: float
    status: int
    name: str


@dataclass
class Refusals:
    """Result of one endpoint."""

    num_bodies: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    worst: list[Held] = field(default_factory=list)

    def note(self, held: Held) -> None:
        """Take the result of one body."""
        self.num_bodies += 1
        self.statuses[held.status] = self.statuses.get(held.status, 0) + 1
        self.worst = heapq.nlargest(NUM_TOLD, [*self.worst, held])

    def figures(self) -> dict[str, Any]:
        """The largest times, and how the bodies were answered."""
        return {
            "held_ms": round(self.worst[0].held_ms, 1),
            "bodies": self.num_bodies,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "worst": {held.name: round(held.held_ms, 1) for held in self.worst},
        }


class Prober:
    """The process that asks ``/livez``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def longest_ms(self) -> float:
        """Tell the longest wait since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())


def run(quick: bool) -> dict[str, Any]:
    """Measure every endpoint that takes a body."""
    with TemporaryDirectory(prefix="moesaic-bench-") as directory:
        redis, url = start_redis(Path(directory) / "redis")
        try:
            endpoints = asyncio.run(_measure(url, Path(directory), EVERY if quick else 1))
        finally:
            redis.terminate()
            redis.wait()
    over = [path for path, endpoint in endpoints.items() if endpoint.worst[0].held_ms > MOST_MS]
    return {
        "config": {"max_body_bytes": MAX_BYTES, "most_ms": MOST_MS, "tries": TRIES},
        "figures": {path: endpoint.figures() for path, endpoint in endpoints.items()},
        "notes": [
            "held_ms: the longest wait of /livez while one body was answered, the best of some tries",
            "routes that share a function and its type of body are measured once",
            "workers answer at once, so that accepted bodies show the gateway's own work alone",
            *([f"quick: one body of {EVERY}"] if quick else []),
        ],
        "failed": f"the loop was held for more than {MOST_MS:g} ms: {', '.join(over)}"
        if over
        else "",
    }


async def _measure(redis_url: str, directory: Path, every: int) -> dict[str, Refusals]:
    flags = ["--cluster", CLUSTER, "--files-dir", str(directory / "files"), *QUICK_END]
    async with (
        instant_worker(redis_url, CLUSTER),
        gateway_process(redis_url, *flags) as gateway,
    ):
        await gateway.until("/readyz")
        endpoints = {}
        async with _prober(gateway.port) as prober:
            for path, requests in _requests():
                endpoint = endpoints[path] = Refusals()
                for number, (name, sent) in enumerate(requests):
                    if number % every == 0:
                        endpoint.note(await _held(gateway.port, prober, name, sent))
        return endpoints


def _requests() -> Iterator[tuple[str, Iterator[tuple[str, bytes]]]]:
    """Make all requests, by path; of paths with one type of body the first alone."""
    known = set()
    for path, kind in body_types():
        if kind not in known:
            known.add(kind)
            bodies = large_bodies(kind, LIMITS)
            yield path, ((name, request(path, body)) for name, body in bodies)
    yield FILES, large_forms(MAX_BYTES)


@asynccontextmanager
async def _prober(port: int) -> AsyncIterator[Prober]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.refusals.probe", str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Prober(process)
    finally:
        process.terminate()
        await process.wait()


async def _held(port: int, prober: Prober, name: str, sent: bytes) -> Held:
    best, status = float("inf"), 0
    for _ in range(TRIES):
        connection = await Connection.open(port)
        await prober.longest_ms()
        status, _ = await connection.answer(sent)
        best = min(best, await prober.longest_ms())
        connection.close()
        if best < WORTH_A_TRY_MS:
            break
    return Held(best, status, name)
