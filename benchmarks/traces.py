"""Cost of traces: requests without traces, with traces for others only, and traced themselves, in turns.

The model is the demo model: its steps are short, so whatever else a step or a request costs shows most. The suites of a
topology run at the same time, and one of them is asked at a time. In the suite with traces, the header ``traceparent``
of a request decides. Beside tokens a second, the benchmark counts the processors' time of a suite's processes, which
other work on the machine changes less.

``MOESAIC_BENCH_BEFORE`` names another checkout, such as that of the commit before a change, which then takes part.
"""

import asyncio
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.common.turns import in_turn, ratios, spread
from moesaic.cli.load.generator import COMPLETIONS, LoadClient

BEFORE = "MOESAIC_BENCH_BEFORE"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
TOPOLOGIES = "local", "disaggregated"
LASTS_S = 420  # turns of one topology
# Spans of a turn are sent within it. By default more of them are sent together, which costs less.
SENDING = {"OTEL_BSP_SCHEDULE_DELAY": "40"}
SENT_S = 0.06
TOKENS = range(300, 2000)  # plain ones of the demo model's vocabulary


@dataclass(frozen=True)
class TracedWorkload:
    """Requests of one turn.

    Attributes:
        clients: that ask at the same time.
        requests: in a turn.
        prompt_tokens: of each.
        answer_tokens: of each; 1: the tokens of prompts are counted instead.
    """

    clients: int
    requests: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def counted(self) -> int:
        """Tokens of a turn."""
        each = self.answer_tokens if self.answer_tokens > 1 else self.prompt_tokens
        return self.requests * each


WORKLOADS = {
    "generation_1": TracedWorkload(1, 1, 16, 16),
    "generation_8": TracedWorkload(8, 8, 16, 16),
    "prefill": TracedWorkload(1, 1, 256, 1),
}


@dataclass
class _Side:
    """A suite, and whether requests say that they are traced; None: they say nothing."""

    suite: RunningSuite
    is_traced: bool | None = None
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WORKLOADS})
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WORKLOADS})


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure every side in each turn, and tell after each topology; ``quick``: for a minute each."""
    figures: dict[str, Any] = {}
    lasts_s = 60 if quick else LASTS_S
    for topology in TOPOLOGIES:
        with ExitStack() as parts:
            sides = dict(_sides(parts, topology))
            # The first one warms up.
            turn, until = -1, time.monotonic() + lasts_s
            while turn < 1 or time.monotonic() < until:
                _take(sides, turn)
                turn += 1
            figures[topology] = {
                "turns": turn,
                "load_average": round(os.getloadavg()[0], 1),
                **{workload: _figures(sides, workload) for workload in WORKLOADS},
                "cpu_over_off_of_all_workloads": _together(sides),
            }
        yield {
            "config": {
                "workloads": {
                    name: [w.clients, w.requests, w.prompt_tokens, w.answer_tokens]
                    for name, w in WORKLOADS.items()
                },
                "lasts_s": lasts_s,
                **({"before": name} if (name := _before_commit()) else {}),
            },
            "figures": figures,
            "notes": [
                "workloads: clients at once, requests of a turn, tokens of each prompt and answer",
                "off: no endpoint, packages installed; none: an endpoint, no request traced; all: every request traced",
                "before: another checkout, without an endpoint",
                "tokens/s over REST, generated ones with their prompts in the time; prefill: of prompts",
                "cpu_us_per_token: user and system time of all processes of the suite but Redis",
                "over_off: turn by turn, the median, and the bounds between which it lies with 95 % certainty",
                "cpu_added_by_one_in_a_hundred: a hundredth of what a traced request adds, over the time of a request",
            ],
        }


def _sides(parts: ExitStack, topology: str) -> Iterator[tuple[str, _Side]]:
    def started(*flags: str, **settings: str) -> RunningSuite:
        suite = running_suite("--topology", topology, *flags, **settings)
        return parts.enter_context(suite)

    if before := os.environ.get(BEFORE):
        yield "before", _Side(started(PYTHONPATH=f"{before}/libs{os.pathsep}{before}"))
    yield "off", _Side(started())
    collector = parts.enter_context(_collector())
    yield "none", _Side(started(f"--otlp-endpoint={collector}"), False)
    yield "all", _Side(started(f"--otlp-endpoint={collector}", **SENDING), True)


def _take(sides: Mapping[str, _Side], turn: int) -> None:
    for name, workload in WORKLOADS.items():
        for side in in_turn(sides.values(), turn):
            before = _cpu_s(side.suite)
            seconds = asyncio.run(_asked(side, workload))
            time.sleep(SENT_S)
            if turn >= 0:
                side.rates[name].append(workload.counted / seconds)
                side.cpu_us[name].append((_cpu_s(side.suite) - before) * 1e6 / workload.counted)


_seeds = count()


async def _asked(side: _Side, workload: TracedWorkload) -> float:
    """Ask for answers to new prompts, one a request; return the seconds."""
    drawn = random.Random(next(_seeds))
    client = LoadClient(side.suite.port, COMPLETIONS)

    def body(_: int) -> dict[str, Any]:
        return {
            "model": "demo",
            "prompt": drawn.choices(TOKENS, k=workload.prompt_tokens),
            "max_tokens": workload.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def headers(_: int) -> dict[str, str]:
        if side.is_traced is None:
            return {}
        trace, span = drawn.getrandbits(127) + 1, drawn.getrandbits(63) + 1
        return {"traceparent": f"00-{trace:032x}-{span:016x}-{side.is_traced:02x}"}

    await client.open(workload.clients)
    requests = await client.open_loop(
        [0.0] * workload.requests, body, headers, most=workload.clients
    )
    client.close()
    if wrong := [each.error for each in requests if not each.complete]:
        raise RuntimeError(f"{len(wrong)} requests failed, the first one: {wrong[0]}")
    return max(each.end_s for each in requests)


def _cpu_s(suite: RunningSuite) -> float:
    """Sum up the processors' time of all threads, which the kernel tells in nanoseconds."""
    threads = (
        thread
        for each in suite.processes.values()
        for thread in Path(f"/proc/{each['pid']}/task").iterdir()
    )
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def _figures(sides: Mapping[str, _Side], workload: str) -> dict[str, Any]:
    rates = {name: side.rates[workload] for name, side in sides.items()}
    cpu_us = {name: side.cpu_us[workload] for name, side in sides.items()}
    shape = WORKLOADS[workload]
    ms_per_us = shape.counted / shape.requests / 1000
    found: dict[str, Any] = {
        name: {
            "tokens_per_s": spread(rates[name], 1),
            "cpu_us_per_token": spread(cpu_us[name], 1),
            "tokens_per_s_over_off": _between(ratios(rates[name], rates["off"])),
            "cpu_over_off": _between(ratios(cpu_us[name], cpu_us["off"])),
        }
        for name in sides
    }
    pairs = zip(cpu_us["all"], cpu_us["none"], strict=True)
    added_ms = _between([ms_per_us * (ours - theirs) for ours, theirs in pairs])
    of_request_ms = ms_per_us * statistics.median(cpu_us["none"])
    found["cpu_ms_added_to_a_traced_request"] = added_ms
    found["cpu_added_by_one_in_a_hundred"] = round(added_ms["median"] / of_request_ms / 100, 5)
    return found


def _together(sides: Mapping[str, _Side]) -> dict[str, Any]:
    off = sides["off"].cpu_us
    return {
        name: _between([one for w in WORKLOADS for one in ratios(side.cpu_us[w], off[w])])
        for name, side in sides.items()
    }


def _between(values: list[float]) -> dict[str, float]:
    """Report the median, and the bounds between which it lies with 95 % certainty if turns are alike."""
    ordered, middle = sorted(values), len(values) / 2
    reach = 0.98 * math.sqrt(len(values))
    low, high = max(0, math.floor(middle - reach)), min(len(values) - 1, math.ceil(middle + reach))
    found = {"low": ordered[low], "median": statistics.median(ordered), "high": ordered[high]}
    return {name: round(value, 4) for name, value in found.items()}


def _before_commit() -> str:
    if not (before := os.environ.get(BEFORE)):
        return ""
    asked = ["git", "-C", before, "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def _collector() -> Iterator[str]:
    """Take spans and forget them."""
    taking = grpc.unary_unary_rpc_method_handler(
        lambda request, context: ExportTraceServiceResponse(),
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Export": taking}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
