"""Supervision of a suite's processes: kept running, and stopped in order."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from moesaic.addresses import host_port
from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cli.machine.state import ProcessState
from moesaic.cli.suite.child import Child, last_lines
from moesaic.cli.suite.processes import GRACE_S, LOOPBACK, STOP_ORDER, Service, module_of
from moesaic.cli.suite.restart import GiveUp, RestartPolicy

CLOSE_S = 5.0  # time for a service to close after its grace time


class ServiceFailed(Exception):
    """A service cannot run, so the suite stops."""

    def __init__(
        self, name: str, status: int, reason: str, log: Path, lines: Sequence[str]
    ) -> None:
        self.name, self.status = name, status
        shown = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        how = f"{_exit_text(status)}, and {reason}"
        super().__init__(f"{name} {how}; the end of {log}:\n{shown}")


def command_of(service: Service, admin_port: int, metrics_port: int) -> list[str]:
    """Give the command line that starts a service on the given ports."""
    if service.program:
        return [*service.program]
    ports = ("--admin-port", str(admin_port), "--metrics-port", str(metrics_port))
    return [*service.enter, sys.executable, "-m", module_of(service.role), *service.flags, *ports]


@dataclass
class _Kept:
    """A service with its current child."""

    service: Service
    shown: ProcessState
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    child: Child | None = None
    ports: ExitStack = field(default_factory=ExitStack)  # held for the child


class Supervisor:
    """Runs services until a stop is asked for.

    Args:
        services: to run.
        log_directory: gets one ``<name>.log`` per service.
        announce: called with (name, line for people) when a service comes or goes.
        changed: called after every change of ``processes``.
        command: makes a service's command line from its admin and metrics port.
    """

    def __init__(
        self,
        services: Sequence[Service],
        log_directory: Path,
        *,
        announce: Callable[[str, str], None],
        changed: Callable[[], None],
        command: Callable[[Service, int, int], list[str]] = command_of,
    ) -> None:
        self._announce, self._changed, self._command = announce, changed, command
        self._worked = False
        self._kept = []
        for service in services:
            log = str(log_directory / f"{service.name}.log")
            shown = ProcessState(name=service.name, role=service.role, log=log)
            self._kept.append(_Kept(service, shown))

    @property
    def processes(self) -> list[ProcessState]:
        """The present state of every service."""
        return [kept.shown for kept in self._kept]

    def worked(self) -> None:
        """Take note that all services together have worked: what they were given is sound."""
        self._worked = True

    async def run(self, environment: Mapping[str, str], stop: asyncio.Event) -> None:
        """Keep all services running until ``stop`` is set, then stop them in order.

        No process is left behind, even after an error.

        Args:
            environment: of every service; a service's own entries come on top.
            stop: asks for the end.

        Raises:
            ServiceFailed: a service cannot be kept running.
        """
        stopped = asyncio.create_task(stop.wait())
        keepers = [asyncio.create_task(self._keep(kept, environment)) for kept in self._kept]
        tasks = {stopped, *keepers}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Raises if a service failed.
                await task
        finally:
            # Nothing is restarted from here on.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_in_order()

    def kill(self) -> None:
        """End every process at once."""
        for kept in self._kept:
            if kept.child is not None:
                kept.child.kill()

    async def _keep(self, kept: _Kept, environment: Mapping[str, str]) -> None:
        """Start a service, and start it again whenever it exits."""
        name, log = kept.service.name, Path(kept.shown.log)
        while True:
            child = await self._start(kept, environment)
            status = await child.wait()
            ran_s = child.ran_s
            kept.shown.pid = 0
            self._changed()
            verdict = kept.policy.exited(status, ran_s, worked=self._worked)
            if isinstance(verdict, GiveUp):
                raise ServiceFailed(name, status, verdict.reason, log, last_lines(log))
            again = f"starts again in {verdict.delay_s:g} s"
            self._announce(name, f"{_exit_text(status)} after {ran_s:.1f} s, {again}")
            await asyncio.sleep(verdict.delay_s)
            kept.shown.restarts += 1

    async def _start(self, kept: _Kept, environment: Mapping[str, str]) -> Child:
        service, shown = kept.service, kept.shown
        # New ports at every start: an old one may have been taken meanwhile.
        kept.ports.close()
        held = [kept.ports.enter_context(hold_port(LOOPBACK)) for _ in ("admin", "metrics")]
        admin_port, metrics_port = map(number_of, held)
        command = self._command(service, admin_port, metrics_port)
        own_environment = {**environment, **service.environment}
        child = kept.child = await Child.start(command, own_environment, Path(shown.log))
        shown.pid = child.pid
        if not service.program:
            shown.admin_address = host_port(service.host, admin_port)
            shown.metrics_address = host_port(service.host, metrics_port)
        self._announce(service.name, f"started (pid {child.pid})")
        self._changed()
        return child

    async def _stop_in_order(self) -> None:
        for role in STOP_ORDER:
            ending = [kept for kept in self._kept if kept.service.role == role and kept.child]
            children = [kept.child for kept in ending if kept.child and kept.child.running]
            await asyncio.gather(*(child.stop(GRACE_S + CLOSE_S) for child in children))
            for kept in ending:
                kept.shown.pid = 0
                kept.ports.close()
            self._changed()


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
