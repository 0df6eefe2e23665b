"""What choosing replicas batch by batch, and steps in parts, bring to a whole suite of processes.

Suites of the demo model, each with three expert workers that have spare slots, run at once and take turns within each
round, so that drift of the machine meets all of them. Their workers say how many experts they activated.
"""

import gzip
import os
import statistics
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.suite import DEMO, RunningSuite, running_suite
from moesaic.models.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "models/training/data/text/wikitext2.test.txt.gz"
WORKERS, SLOTS = 3, 22  # every expert is on two workers, two on all three
POLICIES = ("aebs", "static", "first", "random")
SIDES: dict[str, dict[str, str]] = {
    **{name: {"MOESAIC_EXPERT_SCHEDULING": name} for name in POLICIES},
    "aebs, 2 micro-batches": {"MOESAIC_MICRO_BATCHES": "2"},
}
SEQUENCES = (8, 32, 64)
PROMPT_TOKENS = 8
ANSWER_S = 600.0
COUNTS = {
    "batches": "moesaic_experts_activated_count",
    "activated": "moesaic_experts_activated_sum",
    "most_activated": "moesaic_experts_activated_max_total",
    "scheduling_s": "moesaic_expert_scheduling_seconds_total",
}


def run(quick: bool) -> dict[str, Any]:
    """Every side, in turns."""
    rounds, tokens = (2, 16) if quick else (6, 32)
    prompts = _prompts(rounds * max(SEQUENCES))
    figures: dict[str, Any] = {}
    with ExitStack() as running:
        flags = ("--experts", str(WORKERS), "--slots-per-layer", str(SLOTS))
        suites = {
            name: running.enter_context(running_suite(*flags, **settings))
            for name, settings in SIDES.items()
        }
        for count in SEQUENCES:
            for suite in suites.values():
                _generate(suite, prompts[:count], 4)  # warms up
            before = {name: _counts(suite) for name, suite in suites.items()}
            rates: dict[str, list[float]] = {name: [] for name in suites}
            for at in range(rounds):
                asked = prompts[at * count : (at + 1) * count]
                for name in _rotated(list(suites), at):
                    took_s = _generate(suites[name], asked, tokens)
                    rates[name].append(count * tokens / took_s)
            figures[f"{count}_sequences"] = {
                name: _figures(before[name], _counts(suite), rates[name], rates["aebs"])
                for name, suite in suites.items()
            }
    return {
        "config": {
            "model": "demo",
            "expert_workers": WORKERS,
            "slots_per_layer": SLOTS,
            "sides": SIDES,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": tokens,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": figures,
        "notes": [
            "most_activated: distinct experts on the worker that has most, mean over layers and batches; activated: "
            "mean over workers as well; scheduling_us: of one worker, for one batch of one layer",
            "tokens_per_s: over REST, prompts included; ratio: to aebs in the same round, median, least and largest",
            "all suites run at once on the same cores, and all but one are idle at a time",
            *(["quick: fewer rounds and tokens, the same code path"] if quick else []),
        ],
    }


def _prompts(count: int) -> list[list[int]]:
    """Pieces of text that the model was not trained on; none comes twice."""
    text = gzip.decompress(TEXT.read_bytes()).decode()[: count * PROMPT_TOKENS * 8]
    ids = Tokenizer.load(DEMO).encode(text)
    return [ids[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS] for n in range(count)]


def _generate(suite: RunningSuite, prompts: list[list[int]], tokens: int) -> float:
    """Seconds that all prompts together take."""
    body = {
        "model": "demo",
        "prompt": prompts,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    with httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S) as client:
        client.get("/livez").raise_for_status()
        started = time.perf_counter()
        response = client.post("/v1/completions", json=body)
        took_s = time.perf_counter() - started
    response.raise_for_status()
    assert response.json()["usage"]["completion_tokens"] == len(prompts) * tokens
    return took_s


def _counts(suite: RunningSuite) -> dict[str, float]:
    """What the expert workers have counted, added up."""
    totals = dict.fromkeys(COUNTS, 0.0)
    for name, process in suite.processes.items():
        if not name.startswith("expert-"):
            continue
        with urllib.request.urlopen(f"http://{process['metrics_address']}/metrics") as page:
            lines = page.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        for key, metric in COUNTS.items():
            totals[key] += float(values[metric])
    return totals


def _figures(
    before: dict[str, float], after: dict[str, float], rates: list[float], base: list[float]
) -> dict[str, Any]:
    added = {key: after[key] - before[key] for key in COUNTS}
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    return {
        "most_activated": round(added["most_activated"] / added["batches"], 3),
        "activated": round(added["activated"] / added["batches"], 3),
        "scheduling_us": round(1e6 * added["scheduling_s"] / added["batches"], 1),
        "tokens_per_s": round(statistics.median(rates), 1),
        "ratio": [
            round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))
        ],
    }


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]
