"""Costs of the gateway: its start, the time it adds to a request, the first token, thousands of idle streams.

- ``started``: time from the start of a gateway's process until ``/livez`` and ``/readyz`` answer 200, in a suite.
- ``added``: the same prompts, one token each, go through REST and directly over the attention
  worker's ``Execute`` stream, in turns. They go to the suite's real worker, and to one that answers
  at once, so that no other time hides the gateway's. The latter is also measured with pauses as
  long as a prefill, after which the processor's caches are cold. It is compared with a route of
  FastAPI that answers with a constant.
- ``first_token``: time to a stream's first token, in steps of that prompt (one is needed), and in
  steps of one row (the mean gap between tokens).
- ``held``: idle streams of one gateway.
"""

import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.execute_stream import ExecuteStream, execute_stream
from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.gateway.bare_route import ROUTE, bare_route
from benchmarks.gateway.held_streams import held_streams
from benchmarks.gateway.process import gateway_process, instant_worker
from moesaic.cli.load.connection import Connection, encoded
from moesaic.open_files import raise_file_limit

PROMPTS = 50
PROMPT_TOKENS = 16
STREAM_TOKENS = 24
REST_S = 0.02
STREAMS = 2000
TEXT = "the old prince came into his room and looked at daughter then spoke of war peace"
CLUSTER = "bench-instant"
ROUTES = ("/v1/completions", "/v1/chat/completions")
TARGETS = {
    "livez_s": 1.0,
    "added_ms": 1.0,
    "first_token_prompt_steps": 3.0,
    "first_token_steps": 3.0,
    "held_streams": STREAMS,
}


def run(quick: bool) -> dict[str, Any]:
    """Measure everything in one suite, experts in the attention worker: the fewest processes on the cores."""
    raise_file_limit()
    starts, pairs, streams = (3, 100, 10) if quick else (10, 1000, 200)
    with running_suite("--topology", "local") as suite:
        figures = asyncio.run(_measure(suite, starts, pairs, streams))
    return {
        "config": {
            "topology": "local",
            "starts": starts,
            "pairs": pairs,
            "streams": streams,
            "prompt_tokens": PROMPT_TOKENS,
        },
        "figures": {**figures, "targets": TARGETS, "missed": _missed(figures)},
        "notes": [
            "added.suite has the worker's own spread in it; added.instant_worker is what the gateway costs in warm "
            "caches, added.instant_worker_rested after as long a pause as the worker's prefill makes",
            "bare_route_ms: a route of FastAPI under uvicorn that checks a body and answers with a constant",
            "step_ms: of one row, as the mean gap between the tokens of a stream; prompt_step_ms: of the prompt's 16 "
            "rows, as the worker counts it, mean; execute_ms has it in it",
            "a prompt of 16 tokens is never found in the prefix cache, so both ways compute it",
            "first_token_steps: the stricter reading of its target; a step of the prompt's rows makes that token, and "
            "reads more experts than a step of one row does",
            "held: one gateway with --max-inflight raised (1024 by default), its worker one that never answers",
            *(["quick: fewer rounds, the same code path"] if quick else []),
        ],
    }


async def _measure(suite: RunningSuite, starts: int, pairs: int, streams: int) -> dict[str, Any]:
    prompts = await _prompts(suite.port)
    # Which leaves bytecode to those that count.
    await _started(suite)
    started = [await _started(suite) for _ in range(starts)]
    async with execute_stream(suite.attention_address) as direct:
        added = await _added(suite.port, direct, prompts, pairs)
    async with (
        instant_worker(suite.redis_url, CLUSTER) as (_, address),
        gateway_process(suite.redis_url, "--cluster", CLUSTER) as gateway,
        execute_stream(address) as direct,
        bare_route() as bare,
    ):
        await gateway.until("/readyz")
        instant = await _added(gateway.port, direct, prompts, pairs)
        rested = await _added(gateway.port, direct, prompts, pairs // 2, REST_S, bare)
    return {
        "started": {
            "livez_s": _deciles([livez for livez, _ in started]),
            "readyz_s": _deciles([readyz for _, readyz in started]),
        },
        "added": {
            "suite": added,
            "instant_worker": instant,
            "instant_worker_rested": rested,
        },
        "first_token": await _first_token(suite, prompts[ROUTES[0]], streams),
        "held": await held_streams(suite.redis_url, STREAMS),
    }


@dataclass(frozen=True)
class Prompt:
    """A request body of one route, and the tokens that the gateway makes of its prompt."""

    route: str
    body: dict[str, Any]
    tokens: list[int]


async def _prompts(port: int) -> dict[str, list[Prompt]]:
    """Make this number of prompts of ``PROMPT_TOKENS`` tokens for each route."""
    rng, connection = random.Random(0), await Connection.open(port)
    prompts: dict[str, list[Prompt]] = {route: [] for route in ROUTES}
    while any(len(found) < PROMPTS for found in prompts.values()):
        text = " ".join(rng.choices(TEXT.split(), k=rng.randint(4, PROMPT_TOKENS)))
        for route, asked in _asked(text).items():
            status, answer = await connection.post("/tokenize", encoded(asked))
            if status != 200:
                raise RuntimeError(f"{status}: {answer!r}")
            tokens = json.loads(answer)["tokens"]
            if len(tokens) == PROMPT_TOKENS and len(prompts[route]) < PROMPTS:
                prompts[route].append(Prompt(route, asked, tokens))
    connection.close()
    return prompts


def _asked(text: str) -> dict[str, dict[str, Any]]:
    return dict(
        zip(
            ROUTES,
            ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}),
            strict=True,
        )
    )


async def _started(suite: RunningSuite) -> tuple[float, float]:
    async with gateway_process(suite.redis_url) as gateway:
        return await gateway.until("/livez"), await gateway.until("/readyz")


async def _added(
    port: int,
    direct: ExecuteStream,
    prompts: dict[str, list[Prompt]],
    pairs: int,
    rest_s: float = 0,
    bare: Connection | None = None,
) -> dict[str, Any]:
    """Measure the gateway's addition to a request.

    Returns:
        Medians in ms: of the stream, of the time that REST takes longer for the same prompt, and, where there is one,
        of the bare route.
    """
    connection, rng = await Connection.open(port), random.Random(1)
    alone: list[float] = []
    added: dict[str, list[float]] = {route: [] for route in ROUTES}
    constant: list[float] = []
    # The first ones warm up.
    for number in range(-20, pairs):
        for route in ROUTES:
            prompt = prompts[route][number % PROMPTS]
            ways = [
                lambda p=prompt: direct.one_token(p.tokens),
                lambda p=prompt: _rest(connection, p),
            ]
            first = rng.randrange(2)
            took = {}
            for way in (first, 1 - first):
                await asyncio.sleep(rest_s)
                took[way] = await ways[way]()
            if number >= 0:
                alone.append(took[0])
                added[route].append(took[1] - took[0])
        if bare is not None:
            await asyncio.sleep(rest_s)
            took_s = await _posted(bare, ROUTE, {"prompt": TEXT})
            constant += [took_s] if number >= 0 else []
    connection.close()
    figures: dict[str, Any] = {
        "execute_ms": _milliseconds(alone),
        "completions_added_ms": _milliseconds(added[ROUTES[0]]),
        "chat_added_ms": _milliseconds(added[ROUTES[1]]),
    }
    if bare is not None:
        figures["bare_route_ms"] = _milliseconds(constant)
        in_routes = statistics.median(added[ROUTES[0]]) / statistics.median(constant)
        figures["completions_added_bare_routes"] = round(in_routes, 2)
    return figures


async def _rest(connection: Connection, prompt: Prompt) -> float:
    return await _posted(connection, prompt.route, prompt.body)


async def _posted(connection: Connection, route: str, asked: dict[str, Any]) -> float:
    """Post a request, and measure the seconds until the answer is here."""
    body = encoded({"model": "demo", "max_tokens": 1, "temperature": 0, **asked})
    started = time.perf_counter()
    status, answer = await connection.post(route, body)
    took = time.perf_counter() - started
    if status != 200:
        raise RuntimeError(f"{status}: {answer!r}")
    return took


async def _first_token(
    suite: RunningSuite, prompts: Sequence[Prompt], streams: int
) -> dict[str, Any]:
    connection = await Connection.open(suite.port)
    before = _steps(suite)
    for number in range(streams):
        await _rest(connection, prompts[number % PROMPTS])
    # One token each: no other steps.
    prompt_step_ms = _mean_step_ms(before, _steps(suite))
    # Of each stream; its mean.
    first, gaps = [], []
    for number in range(-2, streams):
        body = {**prompts[number % PROMPTS].body, "max_tokens": STREAM_TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        events = connection.stream(ROUTES[0], encoded(body))
        started = time.perf_counter()
        times = [time.perf_counter() async for _ in events]
        if number >= 0:
            first.append(times[0] - started)
            # Tokens that are read together would make single gaps too small. The last event is [DONE].
            gaps.append((times[-2] - times[0]) / (STREAM_TOKENS - 1))
    connection.close()
    return {
        "first_token_ms": _milliseconds(first),
        "step_ms": _milliseconds(gaps),
        "prompt_step_ms": round(prompt_step_ms, 3),
        "first_token_steps": round(statistics.median(first) / statistics.median(gaps), 2),
        "first_token_prompt_steps": round(statistics.median(first) * 1e3 / prompt_step_ms, 2),
    }


def _steps(suite: RunningSuite) -> tuple[float, float]:
    """Number of steps that the attention worker has run, and the seconds that they took."""
    address = suite.processes["attention-0"]["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("moesaic_step_seconds_"))
    return float(found["moesaic_step_seconds_count"]), float(found["moesaic_step_seconds_sum"])


def _mean_step_ms(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0]) * 1e3


def _missed(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are worse than their targets."""
    reached = {
        "livez_s": figures["started"]["livez_s"]["p50"],
        "added_ms": figures["added"]["suite"]["completions_added_ms"]["p50"],
        "first_token_prompt_steps": figures["first_token"]["first_token_prompt_steps"],
        "first_token_steps": figures["first_token"]["first_token_steps"],
    }
    missed = {name: value for name, value in reached.items() if value > TARGETS[name]}
    kept = figures["held"]["kept"]
    return missed | ({"held_streams": kept} if kept < STREAMS else {})


def _milliseconds(times: Sequence[float]) -> dict[str, float]:
    return _deciles([seconds * 1e3 for seconds in times])


def _deciles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = (statistics.quantiles(values, n=10)[i] for i in (0, 4, 8))
    return {"p10": round(low, 3), "p50": round(middle, 3), "p90": round(high, 3)}
