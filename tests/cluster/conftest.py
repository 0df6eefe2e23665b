"""A real Redis that tests may kill, stop and start again, and messages to send."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.messages.registry import WorkerRecord
from tests.redis_servers import RedisServer, RedisServers


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at Redis often: what is seen is the same, and tests wait less."""
    monkeypatch.setattr("moesaic.cluster.redis.streams.BLOCK_S", 0.1)


@pytest.fixture(params=server_programs(), ids=lambda program: program.name)
def redis_program(request: pytest.FixtureRequest) -> Path:
    """Each server that is here: what holds with one must hold with the other."""
    return Path(request.param)


@pytest.fixture
def redis_server(redis_servers: RedisServers, redis_program: Path) -> Iterator[RedisServer]:
    with redis_servers.lent(redis_program) as server:
        yield server


@pytest.fixture
async def bus(redis_server: RedisServer) -> AsyncIterator[Bus]:
    async with Bus.connect(redis_server.url, "test") as bus:
        yield bus


@pytest.fixture
def record() -> Callable[..., WorkerRecord]:
    def make(worker_id: str = "expert-0", generation: int = 1, **fields: object) -> WorkerRecord:
        return WorkerRecord(
            worker_id=worker_id,
            generation=generation,
            **{"role": "expert", "state": "starting", "admin_address": "h:1"} | fields,
        )

    return make
