"""Peers of ``moesaic bench engine`` that are servers of their own, each in the Python that a variable names."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import httpx

from benchmarks.engine.sides import ANSWER_S, START_S, Prompt, Prompts, Side, openai_side

PEER_START_S = 400  # vLLM compiles the model when it starts
MAX_TOKENS = 2048  # of a sequence

Server = tuple["subprocess.Popen[bytes]", httpx.Client]


@contextmanager
def vllm_side(python: str, model: Path) -> Iterator[Side]:
    """vLLM's own server, asked over REST."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    port = free_port()
    flags = {
        "--model": str(model),
        "--served-model-name": model.name,
        "--dtype": "float32",
        "--max-model-len": str(MAX_TOKENS),
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *chain(*flags.items())]
    with running("vLLM", command, port, environment) as (server, client):
        yield taking_turns(server, openai_side(client, model.name))


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str]
) -> Iterator[Server]:
    """A server from when it is healthy, and a client of it."""
    server = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # A server that has been stopped hangs up on idle connections when it goes on.
        once = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=ANSWER_S, limits=once) as client:
            _wait_until_healthy(name, server, client)
            yield server, client
    finally:
        _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    # It has ended on its own.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGCONT)
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(START_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _wait_until_healthy(name: str, server: "subprocess.Popen[bytes]", client: httpx.Client) -> None:
    deadline = time.monotonic() + PEER_START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"{name} ended at its start, status {server.returncode}")
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"{name} was not ready within {PEER_START_S} s")


def taking_turns(server: "subprocess.Popen[bytes]", side: Side) -> Side:
    """A side that is stopped while others have their turn, for its server polls."""

    def generate(prompts: Prompts, num_tokens: int) -> None:
        with _awake(server):
            side.generate(prompts, num_tokens)

    def stream(prompt: Prompt, num_tokens: int) -> list[float]:
        with _awake(server):
            return side.stream(prompt, num_tokens)

    return Side(generate, stream)


@contextmanager
def _awake(server: "subprocess.Popen[bytes]") -> Iterator[None]:
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)
