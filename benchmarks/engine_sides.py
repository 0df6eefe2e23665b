"""Who takes part in ``moesaic bench engine``: whole suites of ours, and the engines that people use today."""

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
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import torch

START_S = 120
VLLM_START_S = 400  # it compiles the model when it starts
ANSWER_S = 600.0

Prompts = list[list[int]]
Side = Callable[[Prompts, int], None]  # runs prompts to so many output tokens each


def transformers_side(model: Any) -> Side:
    """The model in this process, all prompts in one batch."""

    def generate(prompts: Prompts, num_tokens: int) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        assert output.shape[1] == len(prompts[0]) + num_tokens

    return generate


@contextmanager
def suite_side(
    model: Path, topology: str, settings: Mapping[str, str] | None = None
) -> Iterator[Side]:
    """A suite of its own, asked over REST."""
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
                yield lambda prompts, num_tokens: _ask(client, model.name, prompts, num_tokens)
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

            def ask(prompts: Prompts, num_tokens: int) -> None:
                os.killpg(server.pid, signal.SIGCONT)
                _ask(client, model.name, prompts, num_tokens)
                os.killpg(server.pid, signal.SIGSTOP)

            yield ask
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


def _ask(client: httpx.Client, model: str, prompts: Prompts, num_tokens: int) -> None:
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    assert response.json()["usage"]["completion_tokens"] == len(prompts) * num_tokens
