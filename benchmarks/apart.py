"""Parts of a layer's time with attention and experts in processes of their own, and their price.

Real suites serve the model of ``bench engine``: one with all experts in the attention worker, one with
expert workers for every way that frames can travel. They compute the same steps in turns. The parts of a
layer come from the workers' own metrics: what passes between two looks at these, divided by the layers
computed meanwhile.

Beyond computation is what an exchange takes from sending the rows to the sum of the replies, less what its
slowest expert worker took to compute: gate, choice, experts. Each reply says so itself.
"""

import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.common.turns import ratios, spread
from benchmarks.engine.bench import SHAPE, make_model

ROWS = (1, 8, 32, 128, 512)
STREAMS = 32  # up to so many rows are a token of as many streams, more are one prompt
TOKENS = 48
TRANSPORTS = {"rings": "auto", "sockets": "socket", "ucx_shared_memory": "shm", "ucx_tcp": "tcp"}
LOCAL = "local"
IDLE_S = 60
ANSWER_S = 300
SETTLE_S = 3.0  # until workers have counted what they did
ATTENTION_PARTS = ("attend", "send", "wait", "sum", "python")
EXPERT_PARTS = ("receive", "gate", "choose", "compute", "reply")
COMPUTING = ("gate", "choose", "compute")
EXCHANGE = "moesaic_layer_exchange_seconds"
BEYOND = "moesaic_layer_beyond_computation_seconds"
TARGETS_US = {"rings": (100, 400), "sockets": (200, None)}  # of one row: median, 99th percentile

Metrics = Mapping[str, float]  # by name and labels, as they are exposed


def run(quick: bool) -> dict[str, Any]:
    """Measure every side and number of rows, in turns."""
    rounds, idle_s = (2, 10) if quick else (6, IDLE_S)
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as name, ExitStack() as stack:
        make_model(Path(name))
        suites = {
            side: stack.enter_context(_suite(name, transports))
            for side, transports in {LOCAL: None, **TRANSPORTS}.items()
        }
        idle = {side: _idle(suites[side], idle_s) for side in (LOCAL, "rings")}
        figures = {f"{rows}_rows": _measure(suites, rows, rounds) for rows in ROWS}
    return {
        "config": {
            "shape": SHAPE,
            "dtype": "float32",
            "expert_workers": 2,
            "rows": list(ROWS),
            "rounds": rounds,
            "idle_s": idle_s,
            "cores": psutil.cpu_count(),
        },
        "figures": {**figures, "idle_cpu_percent": idle, "targets": _targets(figures, idle)},
        "notes": [
            f"up to {STREAMS} rows: a token of as many streams; more: a prompt of as many tokens",
            "attention and experts: us a layer of the mean step, by part; experts: the busier of the two "
            "workers",
            "exchange: from sending rows to the sum of the replies; beyond computation: less what the slowest "
            "worker of each exchange says that it took to gate, choose and compute",
            "wake_and_travel: the wait less all that the busier worker does; less than it seems where "
            "parts of a step overlap",
            *(["quick: fewer rounds, the same code path"] if quick else []),
        ],
    }


def _suite(model: str, transports: str | None) -> Any:
    settings = {"MOESAIC_KV_BLOCKS": "4096"}
    if transports is None:
        return running_suite("--model", model, "--topology", LOCAL, **settings)
    flags = ("--model", model, "--topology", "disaggregated", "--transports", transports)
    return running_suite(*flags, **settings)


def _measure(suites: Mapping[str, RunningSuite], rows: int, rounds: int) -> dict[str, Any]:
    """All sides in turns; of each the time of a layer, and its parts where there are some."""
    before = {}
    seconds: dict[str, list[float]] = {side: [] for side in suites}
    for number in range(-1, rounds):
        # The round before has warmed up.
        if not number:
            time.sleep(SETTLE_S)
            before = {side: _metrics_of(suite) for side, suite in suites.items()}
        for side, suite in suites.items():
            generator = torch.Generator().manual_seed(number)
            step_s = _step_s(suite, rows, generator, TOKENS)
            if number >= 0:
                seconds[side].append(step_s)
    time.sleep(SETTLE_S)
    figures: dict[str, Any] = {}
    layers = SHAPE["num_hidden_layers"]
    for side, suite in suites.items():
        figures[side] = {
            "layer_us": round(1e6 * statistics.median(seconds[side]) / layers, 1),
            "speed_of_local": spread(ratios(seconds[LOCAL], seconds[side])),
        }
        if side != LOCAL:
            figures[side] |= _parts(before[side], _metrics_of(suite))
    return figures


def _parts(before: Mapping[str, Metrics], after: Mapping[str, Metrics]) -> dict[str, Any]:
    """Parts of a layer, in us, of what happened in between."""
    changes = {
        process: {name: value - before[process].get(name, 0.0) for name, value in now.items()}
        for process, now in after.items()
    }
    attention = changes["attention-0"]
    exchanges = attention.get(f"{EXCHANGE}_count", 0.0)
    if not exchanges:
        return {"layers_without_python": 0}
    own = {
        part: 1e6 * attention[f'moesaic_step_part_seconds_total{{part="{part}"}}'] / exchanges
        for part in ATTENTION_PARTS
    }
    workers = [_answer_parts(changes[name]) for name in changes if name.startswith("expert-")]
    busiest = max(workers, key=lambda parts: sum(parts[part] for part in COMPUTING))
    return {
        "layers_without_python": round(exchanges),
        "attention_us": {part: round(own[part], 1) for part in ATTENTION_PARTS},
        "experts_us": {part: round(busiest[part], 1) for part in EXPERT_PARTS},
        "wake_and_travel_us": round(own["wait"] - sum(busiest.values()), 1),
        "exchange_us": _times(attention, EXCHANGE, exchanges),
        "beyond_computation_us": _times(attention, BEYOND, exchanges),
    }


def _times(changes: Metrics, histogram: str, count: float) -> dict[str, float]:
    """Mean and quantiles of a histogram of seconds, in us."""
    return {
        "mean": round(1e6 * changes[f"{histogram}_sum"] / count, 1),
        "p50": round(_quantile(changes, histogram, 0.5), 1),
        "p99": round(_quantile(changes, histogram, 0.99), 1),
    }


def _answer_parts(changes: Metrics) -> dict[str, float]:
    """Parts of an answer of one expert worker, in us."""
    answers = max(1.0, changes.get("moesaic_expert_answers_without_python_total", 0.0))
    return {
        part: 1e6
        * changes.get(f'moesaic_expert_answer_seconds_total{{part="{part}"}}', 0.0)
        / answers
        for part in EXPERT_PARTS
    }


def _quantile(changes: Metrics, histogram: str, fraction: float) -> float:
    """A quantile of a histogram, in us, in proportion within its bucket."""
    buckets = sorted(
        (float(name.split('le="')[1].split('"')[0]), count)
        for name, count in changes.items()
        if name.startswith(f"{histogram}_bucket")
    )
    wanted, start, below = fraction * buckets[-1][1], 0.0, 0.0
    for end, count in buckets:
        if count >= wanted:
            if end == float("inf"):
                return 1e6 * start
            return 1e6 * (start + (end - start) * (wanted - below) / max(1.0, count - below))
        start, below = end, count
    return 1e6 * start


def _step_s(suite: RunningSuite, rows: int, generator: torch.Generator, tokens: int) -> float:
    """Seconds of a step of this number of rows, from the outside."""
    vocab = SHAPE["vocab_size"]

    def prompt(size: int) -> list[int]:
        return torch.randint(1, vocab, (size,), generator=generator).tolist()

    with httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S) as client:
        client.get("/livez").raise_for_status()
        if rows <= STREAMS:
            return _answer_s(client, [prompt(1) for _ in range(rows)], tokens) / tokens
        count = max(4, tokens // 4)
        return sum(_answer_s(client, [prompt(rows)], 1) for _ in range(count)) / count


def _answer_s(client: httpx.Client, prompts: list[list[int]], tokens: int) -> float:
    (model,) = (each["id"] for each in client.get("/v1/models").json()["data"][:1])
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    started = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    took_s = time.perf_counter() - started
    response.raise_for_status()
    return took_s


def _metrics_of(suite: RunningSuite) -> dict[str, dict[str, float]]:
    """Every metric of every worker."""
    return {
        name: dict(_metrics(process["metrics_address"]))
        for name, process in suite.processes.items()
        if name.startswith(("attention-", "expert-"))
    }


def _metrics(address: str) -> Iterator[tuple[str, float]]:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        for line in page.read().decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                yield name, float(value)


def _idle(suite: RunningSuite, seconds: float) -> dict[str, float]:
    """Percent of a core that each process of an idle suite takes."""
    time.sleep(SETTLE_S)
    processes = {name: psutil.Process(process["pid"]) for name, process in suite.processes.items()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(seconds)
    return {
        name: round(100 * (sum(process.cpu_times()[:2]) - before[name]) / seconds, 2)
        for name, process in processes.items()
    }


def _targets(
    figures: Mapping[str, Any], idle: Mapping[str, Mapping[str, float]]
) -> dict[str, bool]:
    """Tell which targets are met."""
    met = {
        "idle processes take 1 % of a core or less": max(
            value for values in idle.values() for value in values.values()
        )
        <= 1
    }
    for side, (median, slowest) in TARGETS_US.items():
        beyond = figures["1_rows"][side].get("beyond_computation_us")
        if beyond is None:
            continue
        met[f"{side}: beyond computation {median} us or less, median"] = beyond["p50"] <= median
        if slowest is not None:
            met[f"{side}: beyond computation {slowest} us or less, p99"] = beyond["p99"] <= slowest
    return met
