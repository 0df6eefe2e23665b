"""Starts a suite, says when it is ready, keeps it running until a signal, and stops it."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.cli.console import say_at_time
from moesaic.cli.cores import usable_cores
from moesaic.cli.log_tail import show_warnings
from moesaic.cli.outcome import CommandError, Exit
from moesaic.cli.ports import check_port
from moesaic.cli.preflight import check_model, check_redis
from moesaic.cli.readiness import await_ready
from moesaic.cli.redis_keeper import own_redis
from moesaic.cli.state import StateFile, SuiteState, process_start_time
from moesaic.cli.suite import Service, SuiteOptions, services_of, url_of
from moesaic.cli.supervisor import ServiceFailed, Supervisor, child_environment

NAME_WIDTH = 12


def run_suite(
    options: SuiteOptions, ready_within_s: float, on_ready: Callable[[SuiteState], None]
) -> None:
    """Run a suite in the foreground until SIGTERM or SIGINT.

    Args:
        options: what to run.
        ready_within_s: how long the start may take.
        on_ready: called once the gateway takes requests.

    Raises:
        CommandError: something is wrong before the start, the suite does not become ready, or a
            service cannot run.
    """
    state_file = StateFile()
    with state_file.held():
        num_experts = check_model(options.model).moe.num_experts
        services = services_of(options, num_experts, usable_cores())
        check_port(options.host, options.port)
        redis_url = os.environ.get("MOESAIC_REDIS_URL") or os.environ.get("REDIS_URL") or ""
        if redis_url:
            check_redis(redis_url)
        suite = _Suite(options, services, state_file)
        asyncio.run(suite.run(redis_url, ready_within_s, on_ready))


class _Suite:
    """A suite that is being run, and its state file."""

    def __init__(
        self, options: SuiteOptions, services: list[Service], state_file: StateFile
    ) -> None:
        self._services, self._file = services, state_file
        pid = os.getpid()
        self._state = SuiteState(
            pid=pid,
            start_time=process_start_time(pid) or 0,
            state="starting",
            url=url_of(options),
            topology=options.topology,
            model=options.model,
            processes=[],
        )
        self._supervisor: Supervisor | None = None

    async def run(
        self, redis_url: str, ready_within_s: float, on_ready: Callable[[SuiteState], None]
    ) -> None:
        stop = asyncio.Event()
        with self._stop_on_signals(stop):
            if redis_url:
                await self._serve(redis_url, stop, ready_within_s, on_ready)
            else:
                async with own_redis(self._file.directory / "redis", announce) as url:
                    await self._serve(url, stop, ready_within_s, on_ready)

    async def _serve(
        self,
        redis_url: str,
        stop: asyncio.Event,
        ready_within_s: float,
        on_ready: Callable[[SuiteState], None],
    ) -> None:
        secret = os.environ.get("MOESAIC_SECRET") or secrets.token_hex(32)
        logs = self._file.directory
        keep_previous_logs(logs, self._services)
        supervisor = self._supervisor = Supervisor(
            self._services,
            child_environment(redis_url, secret),
            logs,
            announce=announce,
            changed=self._changed,
        )
        running = asyncio.create_task(supervisor.run(stop))
        ready = asyncio.create_task(await_ready(self._state.url, ready_within_s, announce))
        warnings = asyncio.create_task(
            show_warnings([(p.name, Path(p.log)) for p in supervisor.processes], announce)
        )
        try:
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._set("ready")
                on_ready(self._state)
            await running
        except ServiceFailed as error:
            raise CommandError(str(error), Exit.UNHEALTHY) from error
        finally:
            if self._state.state != "stopping":
                self._set("stopping")
            stop.set()
            ready.cancel()
            await asyncio.gather(ready, running, return_exceptions=True)
            warnings.cancel()

    def _set(self, state: str) -> None:
        self._state.state = state  # type: ignore[assignment]
        self._file.write(self._state)

    def _changed(self) -> None:
        if self._supervisor is not None:
            self._state.processes = self._supervisor.processes
            self._file.write(self._state)

    @contextmanager
    def _stop_on_signals(self, stop: asyncio.Event) -> Iterator[None]:
        """The first SIGTERM or SIGINT stops in order, a second one ends everything at once."""
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if stop.is_set():
                if self._supervisor is not None:
                    self._supervisor.kill()
                os._exit(128 + number)  # what may be left dies with this process
            announce("suite", "stopping; again to stop at once")
            self._set("stopping")
            stop.set()

        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def announce(name: str, text: str) -> None:
    """Say one thing about one process of the suite."""
    say_at_time(f"{name:<{NAME_WIDTH}} {text}")


def keep_previous_logs(directory: Path, services: list[Service]) -> None:
    """Start new log files; those of the run before are kept as ``<name>.log.1``."""
    for service in services:
        log = directory / f"{service.name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
