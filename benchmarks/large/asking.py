"""Requests besides greedy answers of a length: many sampled streams, and a chat without a limit."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 48
CHAT_S = 1800.0
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "stream": True}


def as_users_ask(client: httpx.Client, model: str) -> dict[str, Any]:
    """Ask for both; tokens that came, and seconds.

    Raises:
        httpx.HTTPStatusError: an answer was refused.
    """
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as threads:
        tokens = sum(threads.map(lambda seed: _streamed(client, model, seed), range(STREAMS)))
    streamed_s = time.perf_counter() - began
    began = time.perf_counter()
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    answer = (
        client.post("/v1/chat/completions", json=body, timeout=CHAT_S).raise_for_status().json()
    )
    return {
        "sampled_tokens": tokens,
        "sampled_s": round(streamed_s, 1),
        "chat_tokens": answer["usage"]["completion_tokens"],
        "chat_finish_reason": answer["choices"][0]["finish_reason"],
        "chat_s": round(time.perf_counter() - began, 1),
    }


def _streamed(client: httpx.Client, model: str, seed: int) -> int:
    """Count the tokens of one stream."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(300, 4000, (PROMPT_TOKENS,), generator=generator).tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "seed": seed, **SAMPLED}
    usage = {"stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body | usage) as response:
        response.raise_for_status()
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return int(json.loads(events[-1])["usage"]["completion_tokens"])
