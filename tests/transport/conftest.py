import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from moesaic.transport.contract import Handler, Network
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.rings.plane import new_event_loop
from moesaic.transport.ucx import network as network_module
from moesaic.transport.ucx.bindings import UcxWorker
from moesaic.transport.ucx.network import UcxNetwork
from tests import waiting
from tests.transport.linked import Deadlines

SECRET = b"the cluster secret"
LIMITS = FrameLimits.of_hidden_size(4096)
# Of a kind: as on machines without the native library, and with tensors apart from their frames.
BY_PYTHON, APART = " by python", " apart"
KINDS = ["socket", "shm", "tcp", "ring", "socket" + BY_PYTHON, "shm" + BY_PYTHON, "tcp" + BY_PYTHON]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services have such loops. One looks after a single network, others are as in any loop."""
    return {"channels": new_event_loop}


def make_network(kind: str, worker_id: str, role: str, secret: bytes, limits: FrameLimits) -> Any:
    """A network of processes, of one of ``KINDS`` or with ``APART``."""
    with pytest.MonkeyPatch.context() as patch:
        if kind.endswith(BY_PYTHON):
            patch.setattr(network_module, "library", lambda: None)
        device = torch.device("cpu") if kind.endswith(APART) else None
        transports: Any = kind.removesuffix(BY_PYTHON).removesuffix(APART)
        return UcxNetwork(worker_id, role, secret, limits, transports=transports, device=device)


@dataclass
class Cluster:
    """Makes networks of one kind, and closes them."""

    kind: str
    hub: Hub = field(default_factory=Hub)
    networks: list[Network] = field(default_factory=list)

    def network(
        self, worker_id: str, secret: bytes = SECRET, limits: FrameLimits = LIMITS
    ) -> Network:
        made: Network
        if self.kind == "inprocess":
            made = InProcessNetwork(worker_id, secret, limits, self.hub)
        else:
            made = make_network(self.kind, worker_id, "expert", secret, limits)
        self.networks.append(made)
        return made


@pytest.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """Networks of the kind that is its parameter."""
    made = Cluster(request.param)
    yield made
    for network in made.networks:
        await network.close()


@pytest.fixture(params=KINDS)
async def network(request: pytest.FixtureRequest) -> AsyncIterator[UcxNetwork]:
    """The near side of two processes."""
    made = make_network(request.param, "near", "attention", SECRET, LIMITS)
    yield made
    await made.close()


@pytest.fixture
async def deadlines() -> Deadlines:
    """Those of the test's event loop."""
    return Deadlines()


@pytest.fixture
def echo() -> Handler:
    async def answer(request: Frame) -> Frame:
        return request.reply(request.tensors)

    return answer


@pytest.fixture
def ask() -> Callable[..., Frame]:
    """Makes requests."""

    def make(seq: int = 1, rows: int = 4, **fields: object) -> Frame:
        hidden = torch.full((rows, 256), float(seq))
        return Frame(
            kind=FrameKind.REQUEST, request_id=os.urandom(16), seq=seq, tensors=[hidden], **fields
        )

    return make


@dataclass
class Plane:
    """A UCX worker that some network has opened.

    Attributes:
        options: UCX's settings.
        renew: what the worker calls once it is stuck.
    """

    worker: UcxWorker
    options: dict[str, str]
    renew: Callable[[], None]


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> list[Plane]:
    """Those that networks open from now on, in their order."""
    made: list[Plane] = []

    class Noted(UcxWorker):
        def __init__(self, options: Any, reports: bool, most: int, renew: Any, *rest: Any) -> None:
            super().__init__(options, reports, most, renew, *rest)
            made.append(Plane(self, options, renew))

    monkeypatch.setattr(network_module, "UcxWorker", Noted)
    return made


@dataclass
class FarWorker:
    """A process that echoes what it is sent."""

    pid: int
    address: str
    complaints: Path  # what it writes to standard error

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def exists(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()


@pytest.fixture(scope="session")
def worker_factory() -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).with_name("ucx") / "far_worker.py"
    with subprocess.Popen(
        [sys.executable, str(script), SECRET.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def far_worker(
    worker_factory: "subprocess.Popen[str]", tmp_path: Path
) -> Iterator[Callable[[str], FarWorker]]:
    """Starts echoing processes with the given transports, and kills them at the end."""
    started: list[FarWorker] = []

    def start(transports: str) -> FarWorker:
        complaints = tmp_path / f"stderr-{len(started)}"
        assert worker_factory.stdin
        assert worker_factory.stdout
        worker_factory.stdin.write(f"{transports} {complaints}\n")
        pid, address = worker_factory.stdout.readline().split()
        started.append(FarWorker(int(pid), address, complaints))
        return started[-1]

    yield start
    for worker in started:
        worker.signal(signal.SIGKILL)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    return waiting.until
