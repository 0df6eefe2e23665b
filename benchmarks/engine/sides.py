"""Sides of ``moesaic bench engine``: whole suites of ours, and the engines that people use today."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks.common.raw_http import Connection, encoded

START_S = 120
VLLM_START_S = 400  # it compiles the model when it starts
ANSWER_S = 600.0

COMPLETIONS = "/v1/completions"

Prompt = list[int]
Prompts = list[Prompt]


@dataclass(frozen=True)
class Side:
    """One engine that takes part."""

    generate: Callable[[Prompts, int], None]  # run prompts to so many output tokens each
    stream: Callable[[Prompt, int], list[float]]
    """Seconds until each token of one answer is here, from a request that follows another one."""


def transformers_side(model: Any) -> Side:
    """The model in this process, all prompts in one batch."""

    def generate(prompts: Prompts, num_tokens: int, **more: Any) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                **more,
            )
        assert output.shape[1] == len(prompts[0]) + num_tokens

    def stream(prompt: Prompt, num_tokens: int) -> list[float]:
        generate([prompt[::-1]], 1)  # as servers are warmed up
        watch = _Stopwatch()
        generate([prompt], num_tokens, streamer=watch)
        assert len(watch.times) == num_tokens + 1  # the first call brings the prompt
        return watch.times[1:]

    return Side(generate, stream)


class _Stopwatch(transformers.generation.BaseStreamer):  # type: ignore[misc, name-defined]  # untyped there
    """Notes the times at which it is given tokens, in seconds from its making."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """Note a token."""
        self.times.append(time.perf_counter() - self._started)

    def end(self) -> None:
        """Note the end: the last token has come."""


@contextmanager
def suite_side(
    model: Path, topology: str, settings: Mapping[str, str] | None = None
) -> Iterator[Side]:
    """A whole suite of ours, asked over REST."""
    command = [sys.executable, "-m", "moesaic.cli"]
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", str(model), "--topology", topology, "--port", "0", "--detach"]
        subprocess.run(
            [*command, "up", *flags],
            cwd=directory,
            env={**os.environ, "MOESAIC_KV_BLOCKS": "4096", **(settings or {})},
            timeout=START_S,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = json.loads((Path(directory) / "run/moesaic.json").read_text())["url"]
            with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
                yield _server_side(client, model.name)
        finally:
            subprocess.run(
                [*command, "down"], cwd=directory, check=True, capture_output=True, timeout=START_S
            )


@contextmanager
def vllm_side(python: str, model: Path) -> Iterator[Side]:
    """vLLM's own server, asked over REST. It is stopped while others have their turn, for it polls."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    flags = {
        "--model": str(model),
        "--served-model-name": model.name,
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    server = subprocess.Popen(
        [python, "-m", "vllm.entrypoints.openai.api_server", *chain(*flags.items())],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as client:
            _wait_until_healthy(server, client)

            side = _server_side(client, model.name)

            def generate(prompts: Prompts, num_tokens: int) -> None:
                with _awake(server):
                    side.generate(prompts, num_tokens)

            def stream(prompt: Prompt, num_tokens: int) -> list[float]:
                with _awake(server):
                    return side.stream(prompt, num_tokens)

            yield Side(generate, stream)
    finally:
        os.killpg(server.pid, signal.SIGCONT)
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(START_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _wait_until_healthy(server: "subprocess.Popen[bytes]", client: httpx.Client) -> None:
    deadline = time.monotonic() + VLLM_START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended at its start, status {server.returncode}")
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vLLM was not ready within {VLLM_START_S} s")


@contextmanager
def _awake(server: "subprocess.Popen[bytes]") -> Iterator[None]:
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


def _server_side(client: httpx.Client, model: str) -> Side:
    def body(prompt: Any, num_tokens: int) -> dict[str, Any]:
        greedy = {"temperature": 0, "ignore_eos": True}
        return {"model": model, "prompt": prompt, "max_tokens": num_tokens, **greedy}

    def generate(prompts: Prompts, num_tokens: int) -> None:
        response = client.post(COMPLETIONS, json=body(prompts, num_tokens))
        response.raise_for_status()
        assert response.json()["usage"]["completion_tokens"] == len(prompts) * num_tokens

    def stream(prompt: Prompt, num_tokens: int) -> list[float]:
        # With their ids, tokens are told that have no text of their own.
        asked = {**body(prompt, num_tokens), "stream": True, "return_token_ids": True}
        times = asyncio.run(_streamed(client.base_url.port, asked))
        assert len(times) == num_tokens, f"{len(times)} tokens came, {num_tokens} were asked for"
        return times

    return Side(generate, stream)


async def _streamed(port: int | None, asked: dict[str, Any]) -> list[float]:
    """Stream an answer; seconds from the request to each token, of which those of one event come together."""
    assert port is not None
    connection = await Connection.open(port)
    warm_up = encoded({**asked, "max_tokens": 1, "prompt": asked["prompt"][::-1]})
    async for _ in connection.stream(COMPLETIONS, warm_up):
        pass
    started = time.perf_counter()
    events = connection.stream(COMPLETIONS, encoded(asked))
    came = [(time.perf_counter() - started, event) async for event in events]
    connection.close()
    return [at for at, event in came for _ in _token_ids(event)]


def _token_ids(event: bytes) -> list[int]:
    if event == b"[DONE]":
        return []
    return [i for choice in json.loads(event)["choices"] for i in choice.get("token_ids") or ()]
