"""Runs a suite: started, reported when ready, kept running until a signal, and stopped."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from moesaic.cli.checks.links import check_links
from moesaic.cli.checks.preflight import check_cluster, check_redis
from moesaic.cli.clients.credentials import given_secret
from moesaic.cli.clients.readiness import await_ready
from moesaic.cli.clients.rest_key import API_KEY_VARIABLE
from moesaic.cli.machine.cores import usable_cores
from moesaic.cli.machine.links.network import joined
from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cli.machine.state import StateFile, SuiteState, process_start_time
from moesaic.cli.suite.fitting import experts_environment, kv_environment
from moesaic.cli.suite.loading import ShownLoading
from moesaic.cli.suite.log_tail import show_warnings
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.prepare import prepared
from moesaic.cli.suite.processes import Service, name_of, services_of, url_of
from moesaic.cli.suite.redis_keeper import OwnRedis, own_redis
from moesaic.cli.suite.restart import STATUS_LASTING
from moesaic.cli.suite.supervisor import ServiceFailed, Supervisor
from moesaic.cli.terminal.console import say_at_time
from moesaic.cli.terminal.outcome import CommandError, Exit

NAME_WIDTH = 12
FILES_VARIABLE = "MOESAIC_FILES_DIR"

OnReady = Callable[[SuiteState], None]


def run_suite(options: SuiteOptions, ready_within_s: float, on_ready: OnReady) -> None:
    """Run a suite in the foreground until SIGTERM or SIGINT.

    Args:
        options: what to run.
        ready_within_s: longest time for the start, in seconds.
        on_ready: called once the gateway takes requests.

    Raises:
        CommandError: something is wrong before the start, the suite does not become ready, or a
            service cannot run.
    """
    state_file = StateFile()
    redis_url = os.environ.get("MOESAIC_REDIS_URL") or os.environ.get("REDIS_URL") or ""
    # Checked before anything is made: a suite that cannot run leaves no directory.
    options, config, settings, memory = prepared(options)
    num_experts, cores = config.moe.num_experts, usable_cores()
    if options.link_shape:
        check_links(redis_url, [setting.flag for setting in options.settings])
    with state_file.held(), hold_port(options.host, options.port) as held, ExitStack() as parts:
        options = replace(options, port=number_of(held))
        network = None
        if options.link_shape:
            agents = [name_of("edge-agent", number) for number in range(options.agents)]
            network = parts.enter_context(joined(agents, options.link_shape))
        services = services_of(options, num_experts, cores, network)
        if redis_url:
            check_redis(redis_url)
            cluster = os.environ.get("MOESAIC_CLUSTER") or "default"
            check_cluster(redis_url, cluster, [service.name for service in services])
        keep_previous_logs(state_file.directory, services)
        environment = {}
        # Agents divide their memory themselves.
        if options.topology != "edge":
            environment = kv_environment(memory, settings["attention-0"])
            environment |= experts_environment(memory, settings)
        model_name = getattr(settings["gateway"], "name_in_api", "")
        state = SuiteState(
            pid=os.getpid(),
            start_time=process_start_time(os.getpid()) or 0,
            state="starting",
            url=url_of(options, settings["gateway"]),
            topology=options.topology,
            model=options.model,
            model_name=model_name,
            processes=[],
            network=network,
        )
        suite = _Suite(options.api_key, services, state_file, state, environment)
        asyncio.run(suite.run(redis_url, ready_within_s, on_ready))


class _Suite:
    """A running suite and its state file."""

    def __init__(
        self,
        api_key: str,
        services: list[Service],
        state_file: StateFile,
        state: SuiteState,
        environment: Mapping[str, str],
    ) -> None:
        self._file, self._state, self._environment = state_file, state, environment
        self._api_key = api_key
        self._secret = given_secret() or secrets.token_hex(32)
        self._redis: OwnRedis | None = None
        self._stop = asyncio.Event()
        self._written = True  # the state file says what is so
        self._supervisor = Supervisor(
            services, state_file.directory, announce=announce, changed=self._write
        )

    async def run(self, redis_url: str, ready_within_s: float, on_ready: OnReady) -> None:
        """Run until stopped; with a Redis of its own unless one is given."""
        with self._file.needed():
            self._file.write_secret(self._secret)
            self._file.write(self._state)
        with self._stop_on_signals():
            if redis_url:
                await self._serve(redis_url, ready_within_s, on_ready)
                return
            directory = self._file.directory / "redis"
            async with AsyncExitStack() as parts:
                with self._file.needed():
                    redis = own_redis(directory, announce, self._write)
                    self._redis = await parts.enter_async_context(redis)
                await self._serve(self._redis.url, ready_within_s, on_ready)

    async def _serve(self, redis_url: str, ready_within_s: float, on_ready: OnReady) -> None:
        # Through the environment: flags can be read by every user of the machine.
        environment = {
            **os.environ,
            **self._environment,
            FILES_VARIABLE: os.environ.get(FILES_VARIABLE) or str(self._file.directory / "files"),
            API_KEY_VARIABLE: self._api_key,
            "MOESAIC_REDIS_URL": redis_url,
            "MOESAIC_SECRET": self._secret,
        }
        logs = [(p.name, Path(p.log)) for p in self._supervisor.processes]
        warnings = asyncio.create_task(show_warnings(logs, announce))
        running = asyncio.create_task(self._supervisor.run(environment, self._stop))
        loading = ShownLoading(self._supervisor.processes, announce)
        ready = asyncio.create_task(
            await_ready(
                self._state.url,
                ready_within_s,
                announce,
                loading.progressed,
                self._lacks_placement if self._has_agents else None,
            )
        )
        showing = asyncio.create_task(loading.run())
        ready.add_done_callback(lambda _: showing.cancel())
        try:
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not self._stop.is_set():
                ready.result()
                self._supervisor.worked()
                self._enter("ready")
                on_ready(self._state)
            await running
        except ServiceFailed as error:
            lasting = error.status == STATUS_LASTING
            raise CommandError(str(error), Exit.USAGE if lasting else Exit.UNHEALTHY) from error
        finally:
            self._stop.set()
            self._enter("stopping")
            ready.cancel()
            showing.cancel()
            await asyncio.gather(ready, showing, running, return_exceptions=True)
            warnings.cancel()
            await asyncio.gather(warnings, return_exceptions=True)

    @property
    def _has_agents(self) -> bool:
        return any(process.role == "edge-agent" for process in self._supervisor.processes)

    async def _lacks_placement(self) -> list[str]:
        """Agents answer from their files before they hold experts; damaged ones are found while they load them."""
        # Not before, as it imports gRPC.
        from moesaic.cli.clients.fleet import lacks_placement

        addresses = [p.admin_address for p in self._supervisor.processes if p.role == "scheduler"]
        return await lacks_placement(addresses[0]) if all(addresses) else ["the scheduler"]

    def _enter(self, state: Literal["ready", "stopping"]) -> None:
        self._state.state = state
        self._write()

    def _write(self) -> None:
        redis = [self._redis.shown] if self._redis else []
        self._state.processes = [*redis, *self._supervisor.processes]
        try:
            self._file.write(self._state)
        except OSError as error:  # a full disk stops nothing that runs
            if self._written:
                announce("suite", f"{self._file.path} cannot be written: {error.strerror}")
            self._written = False
        else:
            self._written = True

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Stop in order on the first SIGTERM, Ctrl-C or lost terminal; end all at once on the next."""
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if self._stop.is_set():
                self._supervisor.kill()
                # What may be left dies with this process.
                os._exit(128 + number)
            announce("suite", "stopping; the same again stops at once")
            self._stop.set()

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def announce(name: str, text: str) -> None:
    """Print one line about one process of the suite, with the time of day."""
    say_at_time(f"{name:<{NAME_WIDTH}} {text}")


def keep_previous_logs(directory: Path, services: list[Service]) -> None:
    """Keep the logs of the run before as ``<name>.log.1``, so that new files begin."""
    for service in services:
        log = directory / f"{service.name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
