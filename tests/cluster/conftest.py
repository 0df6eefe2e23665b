"""A real Redis that tests may kill, stop and start again, and messages to send."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cluster.bus import Bus
from moesaic.cluster.redis_child import start_redis
from moesaic.messages.registry import WorkerRecord


class RedisServer:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.process, self.url = start_redis(self.directory)

    def kill(self, *, lose_data: bool = False) -> None:
        self.process.kill()
        self.process.wait()
        if lose_data:
            (self.directory / "appendonly.aof").unlink()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.resume()
    server.kill()


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
