"""The weights that a suite loads while it starts: a bar for each process in a terminal, lines elsewhere."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from moesaic.cli.terminal.console import progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from moesaic.cli.machine.state import ProcessState
    from moesaic.v1 import admin_pb2

LOOK_S = 0.5
QUIET_S = 5.0  # between lines of one process


class ShownLoading:
    """Asks the processes of a suite what they load, and shows it."""

    def __init__(
        self, processes: Iterable["ProcessState"], announce: Callable[[str, str], None]
    ) -> None:
        """Show the loading of ``processes``; ``announce`` writes a line, given a name and a text."""
        self._processes, self._announce = list(processes), announce
        self._done: dict[str, int] = {}  # bytes, by process
        self._moved = False
        self._said_s: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}

    def progressed(self) -> bool:
        """True if bytes have come since the last call."""
        moved, self._moved = self._moved, False
        return moved

    async def run(self) -> None:
        """Show it until cancelled."""
        with progress_bar(sizes=True) as bars:
            while True:
                await asyncio.gather(*(self._ask(each, bars) for each in self._processes))
                await asyncio.sleep(LOOK_S)

    async def _ask(self, process: "ProcessState", bars: "Progress") -> None:
        from moesaic.cli.clients.credentials import answer_if_any
        from moesaic.v1 import admin_pb2, admin_pb2_grpc

        if not process.admin_address:
            return
        stub, request = admin_pb2_grpc.AdminServiceStub, admin_pb2.GetInfoRequest()
        info = await answer_if_any(process.admin_address, stub, "GetInfo", request)
        # Else it has not begun to listen, or it has ended.
        if info is not None:
            self._show(process.name, info.loading if info.HasField("loading") else None, bars)

    def _show(self, name: str, loading: "admin_pb2.Loading | None", bars: "Progress") -> None:
        if loading is None:
            if name in self._tasks:
                bars.remove_task(self._tasks.pop(name))
            return
        self._moved |= loading.done_bytes != self._done.get(name)
        self._done[name] = loading.done_bytes
        if name not in self._tasks:
            self._tasks[name] = bars.add_task(name, total=loading.total_bytes)
        bars.update(self._tasks[name], completed=loading.done_bytes, total=loading.total_bytes)
        now_s = asyncio.get_running_loop().time()
        if not sys.stderr.isatty() and now_s - self._said_s.setdefault(name, now_s) >= QUIET_S:
            from moesaic.telemetry.loading import Loading

            self._said_s[name] = now_s
            look = Loading(loading.done_bytes, loading.total_bytes, loading.seconds)
            self._announce(name, f"loading weights: {look}")
