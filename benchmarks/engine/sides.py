"""Sides of ``moesaic bench engine``: what they are asked, transformers in this process, whole suites of ours."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from moesaic.cli.load.connection import Connection, encoded

START_S = 120
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
    client: httpx.Client | None = None  # of its REST API; None: it has none


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
        # As servers are warmed up.
        generate([prompt[::-1]], 1)
        watch = _Stopwatch()
        generate([prompt], num_tokens, streamer=watch)
        # The first call brings the prompt.
        assert len(watch.times) == num_tokens + 1
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
    model: Path,
    topology: str,
    settings: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Iterator[Side]:
    """A whole suite of ours, which starts within ``start_s``, asked over REST."""
    command = [sys.executable, "-m", "moesaic.cli"]
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", str(model), "--topology", topology, "--port", "0", "--detach"]
        subprocess.run(
            [*command, "up", *flags],
            cwd=directory,
            env={**os.environ, "MOESAIC_KV_BLOCKS": "4096", **(settings or {})},
            timeout=start_s,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = json.loads((Path(directory) / "run/moesaic.json").read_text())["url"]
            with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
                yield openai_side(client, model.name)
        finally:
            subprocess.run(
                [*command, "down"], cwd=directory, check=True, capture_output=True, timeout=START_S
            )


def openai_side(client: httpx.Client, model: str) -> Side:
    """A server asked in the words of OpenAI's REST."""

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
        warm_up = body(prompt[::-1], 1)
        events = streamed(client, COMPLETIONS, warm_up, asked)
        times = [at for at, event in events for _ in _token_ids(event)]
        assert len(times) == num_tokens, f"{len(times)} tokens came, {num_tokens} were asked for"
        return times

    return Side(generate, stream, client)


def streamed(
    client: httpx.Client, path: str, warm_up: dict[str, Any], asked: dict[str, Any]
) -> list[tuple[float, bytes]]:
    """Events of an answer, each with the seconds from its request; ``warm_up`` is answered first."""
    port = client.base_url.port
    assert port is not None
    return asyncio.run(_streamed(port, path, encoded(warm_up), encoded(asked)))


async def _streamed(
    port: int, path: str, warm_up: bytes, asked: bytes
) -> list[tuple[float, bytes]]:
    connection = await Connection.open(port)
    # Not streamed: llama.cpp hangs up after a stream.
    status, _ = await connection.post(path, warm_up)
    assert status == 200, f"the request that warms up was answered with {status}"
    started = time.perf_counter()
    came = [(time.perf_counter() - started, e) async for e in connection.stream(path, asked)]
    connection.close()
    return came


def _token_ids(event: bytes) -> list[int]:
    if event == b"[DONE]":
        return []
    return [i for choice in json.loads(event)["choices"] for i in choice.get("token_ids") or ()]
