"""A real Redis that tests may kill, stop and start again, and messages to send."""

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cluster.bus import Bus
from moesaic.cluster.redis_child import server_programs, start_redis
from moesaic.messages.registry import WorkerRecord


class RedisServer:
    def __init__(self, directory: Path, program: Path) -> None:
        self.directory, self.program = directory, program
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        self.process, self.url = start_redis(self.directory, self.program)

    def kill(self, *, lose_data: bool = False) -> None:
        self.process.kill()
        self.process.wait()
        if lose_data:
            shutil.rmtree(self.directory / "appendonlydir")

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(params=server_programs(), ids=lambda program: program.name)
def redis_program(request: pytest.FixtureRequest) -> Path:
    """Each server that is here: what holds with one must hold with the other."""
    return Path(request.param)


@pytest.fixture
def redis_server(tmp_path: Path, redis_program: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis", redis_program)
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
