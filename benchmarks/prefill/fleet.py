"""Attention workers that have a model's experts in one of three ways, with a gateway of their own.

``gathered``, ``all-to-all`` and ``local`` as ``moesaic up --topology`` starts them, but each worker on a host of a
network that may be slow. All wait for requests at the same time, so that rounds can go from one to the other.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.links import LinkedHosts
from benchmarks.common.suite import DEMO, clean_environment
from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cli.suite.child import last_lines
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.security.credentials import Credentials, own_credentials, using

ROOT = Path(__file__).parents[2]
START_S = 240.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class FleetWorker:
    """One attention worker."""

    process: "subprocess.Popen[bytes]"
    metrics_url: str
    log: Path

    def metrics(self) -> dict[str, float]:
        """Sums over labels of each of the worker's counters and gauges."""
        sums: dict[str, float] = {}
        text = httpx.get(self.metrics_url, timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def logged(self, event: str) -> dict[str, Any]:
        """The last value of this name that the worker has logged; nothing if there is none."""
        lines = [line for line in self.log.read_text().splitlines() if f'"{event}"' in line]
        return dict(json.loads(lines[-1])) if lines else {}


@dataclass(frozen=True)
class AttentionFleet:
    """Workers of one kind and their gateway."""

    port: int  # REST
    admin_address: str  # of the gateway
    workers: tuple[FleetWorker, ...]


@contextmanager
def running_fleets(
    kinds: Mapping[str, tuple[str, ...]], num_workers: int, hosts: LinkedHosts | None
) -> Iterator[dict[str, AttentionFleet]]:
    """Start fleets of the demo model, one thread a worker, and wait until all are ready.

    Args:
        kinds: flags of the workers, by ``--dispatch``.
        num_workers: workers of each fleet.
        hosts: run the workers, the first host the first of each fleet; ``None``: they run on this machine and
            share memory.
    """
    with ExitStack() as parts:
        temporary = tempfile.TemporaryDirectory(prefix="moesaic-bench-")
        directory = Path(parts.enter_context(temporary))
        redis, redis_url = start_redis(directory / "redis")
        parts.callback(redis.wait)
        parts.callback(redis.terminate)
        parts.enter_context(using(Credentials(secrets.token_hex(16).encode())))
        num_ports = len(kinds) * (2 + num_workers)
        held = [parts.enter_context(hold_port(LOOPBACK)) for _ in range(num_ports)]
        ports = [number_of(one) for one in held]
        starter = _Starter(parts, directory, redis_url, num_workers, hosts)
        fleets = {
            dispatch: starter.fleet(dispatch, flags, ports[idx :: len(kinds)])
            for idx, (dispatch, flags) in enumerate(kinds.items())
        }
        for fleet in fleets.values():
            _await_ready(fleet)
        yield fleets


@dataclass(frozen=True)
class _Starter:
    """Starts processes that end with ``parts``."""

    parts: ExitStack
    directory: Path
    redis_url: str
    num_workers: int
    hosts: LinkedHosts | None

    def fleet(self, dispatch: str, flags: tuple[str, ...], ports: list[int]) -> AttentionFleet:
        """Start a fleet; it is not ready yet."""
        environment = {
            **clean_environment(),
            "MOESAIC_REDIS_URL": self.redis_url,
            "MOESAIC_SECRET": own_credentials().secret.decode(),
            "MOESAIC_CLUSTER": dispatch,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        rest, admin, *metrics = ports
        flags += ("--dispatch", dispatch)
        workers = tuple(
            self._worker(idx, flags, port, environment) for idx, port in enumerate(metrics)
        )
        gateway = [sys.executable, "-m", "moesaic.services.gateway", "--model", str(DEMO)]
        gateway += ["--port", str(rest), "--admin-port", str(admin)]
        self._start(f"{dispatch}-gateway", gateway, environment)
        return AttentionFleet(rest, f"{LOOPBACK}:{admin}", workers)

    def _worker(
        self, idx: int, flags: tuple[str, ...], metrics_port: int, environment: dict[str, str]
    ) -> FleetWorker:
        host = list(self.hosts.addresses)[idx] if self.hosts else ""
        address = self.hosts.addresses[host] if self.hosts else LOOPBACK
        name = f"attention-{idx}"
        command = [sys.executable, "-m", "moesaic.services.attention", "--model", str(DEMO), *flags]
        command += ["--worker-id", name, "--host", address, "--threads", "1"]
        command += ["--share", f"{idx}/{self.num_workers}", "--metrics-port", str(metrics_port)]
        if self.hosts:
            command = self.hosts.command(host, [*command, "--transports", "socket"])
        process, log = self._start(f"{environment['MOESAIC_CLUSTER']}-{name}", command, environment)
        return FleetWorker(process, f"http://{address}:{metrics_port}/metrics", log)

    def _start(
        self, name: str, command: list[str], environment: dict[str, str]
    ) -> "tuple[subprocess.Popen[bytes], Path]":
        path = self.directory / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.parts.callback(_stop, process)
        return process, path


def _await_ready(fleet: AttentionFleet) -> None:
    """Wait until the gateway has all workers."""
    give_up = time.monotonic() + START_S
    while _accepted(fleet) != len(fleet.workers):
        for worker in fleet.workers:
            if worker.process.poll() is not None or time.monotonic() > give_up:
                words = " | ".join(last_lines(worker.log, 3))
                raise RuntimeError(f"{worker.log.stem} does not become ready: {words}")
        time.sleep(0.2)


def _accepted(fleet: AttentionFleet) -> int:
    import grpc

    from moesaic.cluster.rpc.channels import token_metadata
    from moesaic.v1.gateway_pb2 import GetRouterRequest
    from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub

    tokens = own_credentials().tokens
    assert tokens is not None
    proof = (token_metadata(tokens, "data"),)
    with grpc.insecure_channel(fleet.admin_address) as connection:
        try:
            asking = GatewayServiceStub(connection).GetRouter
            router = asking(GetRouterRequest(), timeout=5, metadata=proof)
        except grpc.RpcError:
            return 0
    return sum(worker.accepting for worker in router.workers)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
