"""Gains of choosing replicas batch by batch, and of steps in parts, in a whole suite of processes.

First, in this process: the time that the slowest of three expert workers computes, for which the others wait, by the
way in which replicas are chosen. Recorded routing, the demo model's own experts, one thread.

Then suites of the demo model run at once, each with three expert workers that have spare slots.
They take turns within each round, so that drift of the machine meets all of them. Their workers
count the experts they activated.

Last, the same with a model whose experts no cache holds: a step takes as long as reading its experts does.
"""

import gzip
import os
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.common.placements import placed_worker
from benchmarks.common.routing_traces import demo_trace
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.turns import ratios, spread
from benchmarks.routed.memory_bound import SHAPE, memory_bound_suites
from benchmarks.routed.memory_bound import SIDES as MEMORY_BOUND_SIDES
from moesaic.experts.assignment import Assigner
from moesaic.experts.costs import experts_cost, measure_experts, ridge_of
from moesaic.experts.slots import SlotTable, load_table
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.text.tokenizer import Tokenizer
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.placement.policies.uniform import uniform

TEXT = Path(__file__).parents[2] / "models/training/data/text/wikitext2.test.txt.gz"
WORKERS, SLOTS = 3, 22  # every expert is on two workers, two on all three
COMPUTED: tuple[ExpertScheduling, ...] = (
    "aebs",
    "aebs-memory-bound",
    "static",
    "random",
    "token-balanced",
    "first",
)
SERVED = ("aebs", "aebs-memory-bound", "static", "random")
ROWS = (8, 32, 128, 512)
BATCHES = 6  # of each layer
REPEATS = 4  # the fastest counts: other processes disturb the others
SIDES: dict[str, dict[str, str]] = {name: {"MOESAIC_EXPERT_SCHEDULING": name} for name in SERVED}
SEQUENCES = (8, 32, 64)
FEW_SEQUENCES = (2, 4, 8, 16)
PROMPT_TOKENS = 8
ANSWER_S = 600.0
SETTLE_S = 3.0  # until workers have counted what they did
COUNTS = {
    "batches": "moesaic_experts_activated_count",
    "activated": "moesaic_experts_activated_sum",
    "most_activated": "moesaic_experts_activated_max_total",
    "scheduling_s": "moesaic_expert_scheduling_seconds_total",
}


def run(quick: bool) -> dict[str, Any]:
    """Measure every side, in turns."""
    rounds, tokens = (2, 16) if quick else (6, 32)
    prompts = _prompts(rounds * max(SEQUENCES))
    assert rounds * max(SEQUENCES) >= 2 * rounds * max(FEW_SEQUENCES)
    threads = torch.get_num_threads()
    # As workers have that share the cores.
    torch.set_num_threads(1)
    ridge, figures = _slowest_worker(2 if quick else BATCHES)
    torch.set_num_threads(threads)
    with ExitStack() as running:
        flags = ("--experts", str(WORKERS), "--slots-per-layer", str(SLOTS))
        suites = {
            name: running.enter_context(running_suite(*flags, **settings))
            for name, settings in SIDES.items()
        }
        figures |= _in_turns(suites, SEQUENCES, prompts, rounds, tokens)
    with memory_bound_suites() as others:
        figures["memory_bound"] = _in_turns(others, FEW_SEQUENCES, prompts, 2 * rounds, tokens)
    return {
        "config": {
            "model": "demo",
            "expert_workers": WORKERS,
            "slots_per_layer": SLOTS,
            "ridge_rows": ridge,
            "sides": SIDES,
            "memory_bound": {"shape": SHAPE, "sides": MEMORY_BOUND_SIDES},
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": tokens,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": figures,
        "notes": [
            "slowest_worker_us: the largest of three workers' times for one layer, mean over layers and batches; "
            "ridge_rows: as measured here, what aebs reckons with",
            "most_activated: distinct experts on the worker that has most, mean over layers and batches; activated: "
            "mean over workers as well; scheduling_us: of one worker, for one batch of one layer",
            "tokens_per_s: over REST, prompts included; ratio: to aebs in the same round, median, least and largest",
            "all suites run at once on the same cores, and all but one are idle at a time",
            "memory_bound: random weights, two expert workers that both have all experts; random: a replica for each "
            "expert and batch, random-per-row: for each row; both are decided in Python, static and aebs are not",
            *(["quick: fewer rounds and tokens, the same code path"] if quick else []),
        ],
    }


def _in_turns(
    suites: Mapping[str, RunningSuite],
    sequences: Sequence[int],
    prompts: list[list[int]],
    rounds: int,
    tokens: int,
) -> dict[str, Any]:
    """Measure all suites with this number of sequences at once."""
    figures: dict[str, Any] = {}
    for count in sequences:
        for suite in suites.values():
            # Warms up
            _generate(suite, prompts[:count], 4)
        before = {name: _counts(suite) for name, suite in suites.items()}
        rates: dict[str, list[float]] = {name: [] for name in suites}
        for at in range(rounds):
            asked = prompts[at * count : (at + 1) * count]
            for name in _rotated(list(suites), at):
                took_s = _generate(suites[name], asked, tokens)
                rates[name].append(count * tokens / took_s)
        time.sleep(SETTLE_S)
        figures[f"{count}_sequences"] = {
            name: _figures(before[name], _counts(suite), rates[name], rates["aebs"])
            for name, suite in suites.items()
        }
    return figures


def _slowest_worker(batches: int) -> tuple[int, dict[str, Any]]:
    """The ridge, and the time of the slowest worker, by rows and policy."""
    config, checkpoint, cpu = load_config(DEMO), Checkpoint(DEMO), torch.device("cpu")
    ridge = ridge_of(experts_cost(measure_experts(config, torch.float32, cpu)))
    placement = _placement(config, ridge)
    wanted = {
        n: {layer: placement.slots[at][n] for at, layer in enumerate(placement.layers)}
        for n in range(WORKERS)
    }
    tables = {
        n: load_table(checkpoint, config, slots, torch.float32, cpu).table
        for n, slots in wanted.items()
    }
    rng, random = np.random.default_rng(0), torch.Generator().manual_seed(0)
    sums: dict[int, dict[str, float]] = {rows: dict.fromkeys(COMPUTED, 0.0) for rows in ROWS}
    for layer, chosen in zip(placement.layers, _recorded(), strict=True):
        everyone = tuple(range(WORKERS))
        assigners = {
            policy: [Assigner(placement, layer, n, policy, everyone, cpu) for n in everyone]
            for policy in COMPUTED
        }
        for rows in ROWS * batches:
            drawn = rng.choice(len(chosen), rows, replace=False)
            topk_ids = torch.from_numpy(chosen[drawn].astype(np.int32))
            hidden = torch.randn(rows, config.hidden_size, generator=random)
            weights = torch.rand(topk_ids.shape, generator=random)
            for policy in COMPUTED:
                seconds = []
                for n in everyone:
                    slot_ids = assigners[policy][n].assign(topk_ids, None, bytes([layer])).slot_ids
                    seconds.append(_fastest_s(tables[n], layer, hidden, weights, slot_ids))
                sums[rows][policy] += max(seconds)
    count = batches * len(placement.layers)
    figures = {
        f"{rows}_rows": {policy: round(1e6 * total / count, 1) for policy, total in each.items()}
        for rows, each in sums.items()
    }
    return ridge, {"slowest_worker_us": figures}


def _fastest_s(
    table: SlotTable, layer: int, hidden: Tensor, weights: Tensor, slot_ids: Tensor
) -> float:
    fastest_s = float("inf")
    with torch.inference_mode():
        for _ in range(REPEATS):
            started = time.perf_counter()
            table.compute_slots(layer, hidden, weights, slot_ids)
            fastest_s = min(fastest_s, time.perf_counter() - started)
    return fastest_s


def _placement(config: ModelConfig, ridge: int) -> Placement:
    """A placement as the scheduler deals experts to new workers."""
    layers = list(config.moe_layers)
    return Placement(
        epoch=1,
        model_digest=config.digest,
        num_experts=config.moe.num_experts,
        workers=[placed_worker(f"expert-{n}", ridge_rows=ridge) for n in range(WORKERS)],
        layers=layers,
        slots=uniform(config.moe.num_experts, len(layers), [SLOTS] * WORKERS),
    )


def _prompts(count: int) -> list[list[int]]:
    """Pieces of text that the model was not trained on; none comes twice."""
    text = gzip.decompress(TEXT.read_bytes()).decode()[: count * PROMPT_TOKENS * 8]
    ids = Tokenizer.load(DEMO).encode(text)
    return [ids[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS] for n in range(count)]


def _generate(suite: RunningSuite, prompts: list[list[int]], tokens: int) -> float:
    """Have all prompts answered, and measure the seconds for all together."""
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
    """Counts of the expert workers, added up."""
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
    return {
        "most_activated": round(added["most_activated"] / added["batches"], 3),
        "activated": round(added["activated"] / added["batches"], 3),
        "scheduling_us": round(1e6 * added["scheduling_s"] / added["batches"], 1),
        "tokens_per_s": round(statistics.median(rates), 1),
        "ratio": spread(ratios(rates, base)),
    }


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _recorded() -> list[NDArray[np.int64]]:
    """Choices of the demo model's gates for the rows of all recorded steps, layer by layer."""
    steps = demo_trace().steps
    return list(np.concatenate([step.topk_ids for step in steps], axis=1).astype(np.int64))
