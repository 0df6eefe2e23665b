"""Suites that several files of tests use: started when a test wants one, and stopped when others are wanted."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import MappingProxyType

import grpc
import pytest

from moesaic.v1.scheduler_pb2 import GetFleetRequest
from moesaic.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.suites import Suite, running
from tests.waiting import HANG_S, eventually

# At once, in one process of tests. Idle suites cost others time, but a test may want as many.
MOST_OPEN = 3
WORKERS = ("attention", "expert", "edge-agent")
PAIR = ("pair", "--topology", "local", "--attention", "2")
LOCAL = ("local", "--topology", "local")  # what others are compared with


class SharedSuites:
    """Keeps the suites that were wanted last."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        """Start nothing yet; each suite has a directory of its own."""
        self._directories = directories
        self._open: dict[
            str, tuple[Suite, ExitStack]
        ] = {}  # the one that was wanted last at the end

    def get(
        self, name: str, *flags: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> Suite:
        """Return a suite that runs, which may have been started for this.

        Args:
            name: of the suite; the same name has the same flags and settings each time.
            flags: of ``moesaic up``.
            settings: of its environment.
        """
        found = self._open.pop(name, None)
        if found is not None:
            _until_whole(found[0])
        else:
            self._stop_all_but(MOST_OPEN - 1)
            with ExitStack() as starting:
                suite = starting.enter_context(
                    running(self._directories.mktemp(name), *flags, settings=settings)
                )
                found = suite, starting.pop_all()
        self._open[name] = found
        return found[0]

    def close(self) -> None:
        """Stop all of them."""
        with ExitStack() as all_of_them:  # of which one may not stop as it should
            for _, stop in self._open.values():
                all_of_them.push(stop)
            self._open.clear()

    def _stop_all_but(self, number: int) -> None:
        while len(self._open) > number:
            _, stop = self._open.pop(next(iter(self._open)))
            stop.close()


def _until_whole(suite: Suite) -> None:
    """Wait until all is back that an earlier test may have killed or cut off."""
    names = {p["name"] for p in suite.state()["processes"] if p["role"] in WORKERS}

    def known() -> bool:
        with (
            suppress(grpc.RpcError),
            suite.blocking_channel(suite.admin_address("scheduler")) as to,
        ):
            fleet = SchedulerServiceStub(to).GetFleet(GetFleetRequest(), timeout=HANG_S)
            there = {worker.worker_id for worker in fleet.workers}
            return not fleet.waiting_for and names <= there
        return False

    eventually(known)
    suite.until_serving()
