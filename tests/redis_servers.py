"""Real Redis servers, one a process of tests: emptied for each test, and replaced after one that harmed it."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from moesaic.cluster.redis.child import start_redis


class RedisServer:
    """A server that a test may kill, stop and start again."""

    def __init__(self, directory: Path, program: Path | None) -> None:
        self._directory, self._program = directory, program
        self.process: subprocess.Popen[bytes]
        self.harmed = False
        self.start()

    def start(self) -> None:
        """Start it, with what it held when it was killed."""
        self.process, self.url = start_redis(self._directory, self._program)

    def kill(self, *, lose_data: bool = False) -> None:
        """Kill it; nothing that it held comes back if it is to lose its data."""
        self.harmed = True
        self.process.kill()
        self.process.wait()
        if lose_data:
            shutil.rmtree(self._directory / "appendonlydir")

    def pause(self) -> None:
        """Let it hang."""
        self.harmed = True
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Forget everything."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


class RedisServers:
    """Lends servers to tests, an empty one to each."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._num_started = directory, 0
        self._idle: dict[Path | None, RedisServer] = {}

    @contextmanager
    def lent(self, program: Path | None = None) -> Iterator[RedisServer]:
        """Lend a server for the length of the block; of the first program there is unless one is given."""
        server = self._idle.pop(program, None) or self._start(program)
        try:
            yield server
        finally:
            if server.harmed or program in self._idle:
                _end(server)
            else:
                server.empty()
                self._idle[program] = server

    def close(self) -> None:
        """End all servers."""
        while self._idle:
            _end(self._idle.popitem()[1])

    def _start(self, program: Path | None) -> RedisServer:
        self._num_started += 1
        return RedisServer(self._directory / str(self._num_started), program)


def _end(server: RedisServer) -> None:
    server.resume()
    server.kill()
