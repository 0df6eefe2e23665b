"""Decoding without traces, with one request in a hundred traced, and with all: suites in turns, and a collector.

``BEFORE=DIR`` adds a side of another checkout, such as that of the commit before a change.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.common.turns import in_turn, ratios, spread
from benchmarks.engine.sides import openai_side

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
SHARES = {"off": None, "1 %": 0.01, "all": 1.0}
CLIENTS, REQUESTS, TOKENS = 16, 64, 64
PROMPTS = [list(range(100 + n, 132 + n)) for n in range(REQUESTS)]


def run(quick: bool) -> dict[str, Any]:
    """Measure every side in each turn; ``quick``: three turns instead of fifteen."""
    turns = 3 if quick else 15
    figures = {}
    for topology in ("local", "disaggregated"):
        with ExitStack() as parts:
            collector = parts.enter_context(_collector())
            sides = dict(_sides(parts, topology, collector))
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(-1, turns):
                for name in in_turn(sides, turn):
                    rate = _rate(sides[name])
                    # The first turn warms up.
                    if turn >= 0:
                        rates[name].append(rate)
        figures[topology] = {
            name: {
                "tokens_per_s": spread(found, 1),
                "times_those_of_off": spread(ratios(found, rates["off"])),
            }
            for name, found in rates.items()
        }
    return {
        "config": {
            "requests_at_once": CLIENTS,
            "requests": REQUESTS,
            "tokens": TOKENS,
            "turns": turns,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": figures,
        "notes": ["tokens/s over REST of answers, their prompts of 32 tokens in the time"],
    }


def _sides(parts: ExitStack, topology: str, collector: str) -> Iterator[tuple[str, httpx.Client]]:
    flags = "--topology", topology
    for name, share in SHARES.items():
        traced = () if share is None else (f"--otlp-endpoint={collector}", f"--trace-share={share}")
        yield name, _client(parts, *flags, *traced)
    if before := os.environ.get("BEFORE"):
        yield "before", _client(parts, *flags, PYTHONPATH=f"{before}/libs:{before}")


def _client(parts: ExitStack, *flags: str, **settings: str) -> httpx.Client:
    suite: RunningSuite = parts.enter_context(running_suite(*flags, **settings))
    url = f"http://127.0.0.1:{suite.port}"
    return parts.enter_context(httpx.Client(base_url=url, timeout=600))


def _rate(client: httpx.Client) -> float:
    """Ask for one answer a request, as each is traced or not for itself."""
    side, began_s = openai_side(client, "demo"), time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(lambda prompt: side.generate([prompt], TOKENS), PROMPTS))
    return REQUESTS * TOKENS / (time.perf_counter() - began_s)


@contextmanager
def _collector() -> Iterator[str]:
    """Take spans and forget them."""
    taking = grpc.unary_unary_rpc_method_handler(
        lambda request, context: ExportTraceServiceResponse(),
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    handlers: Mapping[str, grpc.RpcMethodHandler] = {"Export": taking}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
