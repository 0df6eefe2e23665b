"""A gateway as a process of its own, and attention workers that cost next to nothing, to measure the gateway alone."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.suite import DEMO
from moesaic.cli.load.connection import HOST, Connection
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import registered
from moesaic.cluster.rpc.channels import SERVER_OPTIONS
from moesaic.cluster.security.credentials import own_credentials
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import attention_pb2_grpc

POLL_S = 0.002
START_S = 60.0
SIGN_OF_LIFE_S = 5.0
TOKEN = 50  # of the demo model; what it says is of no interest


@dataclass(frozen=True)
class GatewayProcess:
    """A running gateway."""

    process: subprocess.Popen[bytes]
    port: int
    started: float  # on the clock of time.perf_counter

    async def until(self, path: str) -> float:
        """Measure the seconds from its start until ``path`` is answered with 200.

        Raises:
            RuntimeError: it ended, or took too long.
        """
        while time.perf_counter() - self.started < START_S and self.process.poll() is None:
            with suppress(OSError, asyncio.IncompleteReadError):
                connection = await Connection.open(self.port)
                status, _ = await connection.get(path)
                connection.close()
                if status == 200:
                    return time.perf_counter() - self.started
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"the gateway does not answer {path}")

    @property
    def resident_bytes(self) -> int:
        """Memory that the process has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        """File descriptors that the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@asynccontextmanager
async def gateway_process(redis_url: str, *flags: str) -> AsyncIterator[GatewayProcess]:
    """Start a gateway of the demo model; it stops at the end of the block."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if "MOESAIC" not in name}
    environment["MOESAIC_SECRET"] = own_credentials().secret.decode()
    # Installed, it has its bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "moesaic.services.gateway", "--model", str(DEMO)]
    command += ["--port", str(port), "--redis-url", redis_url, *flags]
    started = time.perf_counter()
    process = _start(command, environment)
    try:
        yield GatewayProcess(process, port, started)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, START_S)


def _start(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


class InstantAttention(attention_pb2_grpc.AttentionServiceServicer):
    """Answers work for one token, and scoring, at once, and lets all other work wait for ever."""

    def __init__(self) -> None:
        self.num_waiting = 0

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """One gateway's stream."""
        events: asyncio.Queue[pb.ExecuteResponse] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator, events))
        try:
            while True:
                try:
                    yield await asyncio.wait_for(events.get(), SIGN_OF_LIFE_S)
                except TimeoutError:
                    yield pb.ExecuteResponse()
        finally:
            reading.cancel()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        """Answer with no load: nothing is computed here."""
        return pb.GetLoadResponse(num_waiting=self.num_waiting)

    async def RecordTrace(self, request: pb.RecordTraceRequest, context: Any) -> AsyncIterator[Any]:
        """End at once: nothing is routed here."""
        for nothing in list[pb.RecordTraceResponse]():
            yield nothing

    async def _read(self, commands: Any, events: "asyncio.Queue[pb.ExecuteResponse]") -> None:
        async for command in commands:
            kind = command.WhichOneof("command")
            if kind == "cancel":
                self.num_waiting -= 1
            elif kind != "submit":
                continue
            elif command.submit.generation.max_tokens <= 1:
                # 0: it scores
                for event in _answer(command.submit):
                    events.put_nowait(event)
            else:
                self.num_waiting += 1


def _answer(submit: pb.Submit) -> tuple[pb.ExecuteResponse, pb.ExecuteResponse]:
    request_id, attempt = submit.request_id, submit.attempt
    finished = pb.Finished(
        reason=pb.FINISH_REASON_LENGTH,
        prompt_tokens=len(submit.token_ids),
        completion_tokens=1,
        epochs=[pb.EpochSpan(epoch=1, tokens=1)],
    )
    told: dict[str, Any] = {"tokens": pb.Tokens(token_ids=[TOKEN])}
    if submit.HasField("scoring"):
        told = {"scores": pb.Scores(logprobs=[-1.0] * len(submit.scoring.candidates))}
    return (
        pb.ExecuteResponse(request_id=request_id, attempt=attempt, **told),
        pb.ExecuteResponse(request_id=request_id, attempt=attempt, finished=finished),
    )


@asynccontextmanager
async def instant_worker(
    redis_url: str, cluster: str
) -> AsyncIterator[tuple[InstantAttention, str]]:
    """Serve an ``InstantAttention`` in this process, registered in a cluster; yields its address as well."""
    worker = InstantAttention()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    attention_pb2_grpc.add_AttentionServiceServicer_to_server(worker, server)
    address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    await server.start()
    record = WorkerRecord(
        worker_id="attention-instant",
        generation=1,
        role="attention",
        state="ready",
        admin_address=address,
        dispatch="local",
    )
    async with Bus.connect(redis_url, cluster) as bus, registered(bus, record):
        yield worker, address
    await server.stop(None)
