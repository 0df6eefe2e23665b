"""The suite's own Redis server, started again whenever it dies."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from moesaic.cli.machine.state import ProcessState
from moesaic.cli.suite.restart import LONGEST_DELAY_S, Again, RestartPolicy
from moesaic.cluster.redis.child import discard_redis, start_redis
from moesaic.errors import MoesaicError

POLL_S = 0.2
GRACE_S = 5.0


class OwnRedis:
    """A Redis server that runs as a child process.

    Its data starts empty, as it describes running processes and none runs yet. It survives a restart
    of the server during the suite's life.
    """

    def __init__(self, directory: Path, announce: Callable[[str, str], None]) -> None:
        # By a suite that was killed.
        for left in directory.glob("*"):
            discard_redis(left)
        self._announce = announce
        # A server that is still ending after a crash of its suite must not touch the new one's.
        self._data = directory / str(os.getpid())
        self._process, self.url = start_redis(self._data)
        log = str(self._data / "redis.log")
        self.shown = ProcessState(name="redis", role="redis", pid=self._process.pid, log=log)

    async def keep(self, changed: Callable[[], None]) -> None:
        """Start the server again whenever it dies, until cancelled."""
        loop, policy = asyncio.get_running_loop(), RestartPolicy()
        started = loop.time()
        while True:
            if self._process.poll() is None:
                await asyncio.sleep(POLL_S)
                continue
            self.shown.pid = 0
            changed()
            verdict = policy.exited(self._process.returncode, loop.time() - started)
            # The suite serves on without Redis, so there is nothing to gain from giving up.
            delay_s = verdict.delay_s if isinstance(verdict, Again) else LONGEST_DELAY_S
            self._announce("redis", f"exited, starts again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            started = loop.time()
            # In this thread, for a moment: the server dies with the thread that starts it.
            try:
                self._process, self.url = start_redis(self._data)
            except MoesaicError as error:
                self._announce("redis", str(error))
                continue
            self.shown.pid = self._process.pid
            self.shown.restarts += 1
            changed()

    async def stop(self) -> None:
        """End the server, and remove its data."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        discard_redis(self._data)


@asynccontextmanager
async def own_redis(
    directory: Path, announce: Callable[[str, str], None], changed: Callable[[], None]
) -> AsyncIterator[OwnRedis]:
    """Run a Redis server with its data under ``directory`` for the length of the block."""
    redis = OwnRedis(directory, announce)
    keeper = asyncio.create_task(redis.keep(changed))
    try:
        yield redis
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        await redis.stop()
