"""Qwen3-30B-A3B's published shape with random weights of 4 bits, beside llama.cpp with the very same numbers.

Both sides together would not fit the memory of a small machine, so they start, are measured and end
in turns. The checkpoint, 34 GB with all 48 layers, is written to the directory MOESAIC_BENCH_LARGE
(default: build/large) and kept. MOESAIC_BENCH_LAYERS sets the number of layers. llama.cpp takes
part if MOESAIC_BENCH_LLAMA_CPP names a Python with xllamacpp.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.turns import in_turn, ratios, spread
from benchmarks.engine.bench import LLAMA_CPP
from benchmarks.engine.llama_cpp import gguf_side, llama_cpp_build
from benchmarks.engine.sides import Side, suite_side
from benchmarks.large.asking import as_users_ask
from benchmarks.large.memory import peak_and_stay
from benchmarks.large.model import CHECKPOINT, CONFIG, GGUF, write_model
from moesaic.cli.terminal.console import say

DIRECTORY, LAYERS = "MOESAIC_BENCH_LARGE", "MOESAIC_BENCH_LAYERS"
STREAMS = (1, 8, 32)
PROMPT_TOKENS, PREFILL_TOKENS = 32, 1024
OUTPUT_TOKENS = {1: 32, 8: 24, 32: 16}
READINGS = {1: 5, 8: 2, 32: 1}  # in a round: those of a few seconds scatter most
ROUNDS = 2
START_S = 1800.0
SETTINGS = {
    "MOESAIC_KV_BLOCKS": "320",
    "MOESAIC_QUANTIZATION": "int4",
    "MOESAIC_REQUEST_TIMEOUT_S": "1800",
    "MOESAIC_MAX_MODEL_LEN": "1088",  # random weights end no chat before
}


def run(quick: bool) -> dict[str, Any]:
    """Write the model if it is not there; then measure the sides in turns."""
    layers = int(os.environ.get(LAYERS, "2" if quick else str(CONFIG["num_hidden_layers"])))
    directory = Path(os.environ.get(DIRECTORY, "build/large"))
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory, layers, say)
    python, rounds = os.environ.get(LLAMA_CPP), 1 if quick else ROUNDS
    sides = ["local", "disaggregated", *(["llama_cpp"] if python else [])]
    rates: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    memory: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    starts: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for name in in_turn(sides, number):
            say(f"round {number + 1}: {name}")
            began = time.monotonic()
            with _side(name, directory, python) as side:
                starts[name].append(time.monotonic() - began)
                for workload, rate in _rates(side, seed=number):
                    rates[name].setdefault(workload, []).append(rate)
                    say(f"{name}: {workload}: {rate:.1f} tokens/s")
                if name != "llama_cpp":
                    memory[name] = peak_and_stay()
                if name not in asked and side.client is not None:
                    asked[name] = as_users_ask(side.client, CHECKPOINT)
    return {
        "config": {
            "layers": layers,
            "model": "Qwen3-30B-A3B",
            "streams": STREAMS,
            "rounds": rounds,
        },
        "figures": {
            "tokens_per_s": {n: {w: spread(v) for w, v in by.items()} for n, by in rates.items()},
            "times_llama_cpp": _ratios(rates),
            "start_s": {name: spread(values) for name, values in starts.items()},
            "memory_mb": memory,
            "asked": asked,
        },
        "notes": [
            "one prompt of 32 tokens a stream, token ids over REST, greedy; prefill: one prompt of 1,024",
            "of a round the median: five readings of one stream, two of 8, one of 32",
            "asked, in the first round: 16 sampled streams (temperature 0.8, top-p 0.9), and a chat without a limit",
            "the sides are never up together: in a round each starts, is measured and ends; ratios by round",
            *(
                [llama_cpp_build(python)]
                if python
                else [f"llama.cpp takes part where {LLAMA_CPP} says"]
            ),
        ],
    }


@contextmanager
def _side(name: str, directory: Path, python: str | None) -> Iterator[Side]:
    if name == "llama_cpp":
        assert python is not None
        with gguf_side(python, directory / GGUF, max(STREAMS)) as side:
            yield side
    else:
        with suite_side(directory / CHECKPOINT, name, SETTINGS, START_S) as side:
            yield side


def _rates(side: Side, seed: int) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(300, 4000, (count, length), generator=generator).tolist()

    # Warm up
    side.generate(prompts(1, PROMPT_TOKENS), 4)

    def decoding(count: int, tokens: int) -> float:
        asked = prompts(count, PROMPT_TOKENS)
        began = time.perf_counter()
        side.generate(asked, 1)
        first = time.perf_counter() - began
        # Others, for the first ones are cached now.
        asked = prompts(count, PROMPT_TOKENS)
        began = time.perf_counter()
        side.generate(asked, 1 + tokens)
        return count * tokens / (time.perf_counter() - began - first)

    for count in STREAMS:
        readings = [decoding(count, OUTPUT_TOKENS[count]) for _ in range(READINGS[count])]
        yield f"{count} streams", statistics.median(readings)
    began = time.perf_counter()
    side.generate(prompts(1, PREFILL_TOKENS), 1)
    yield "prefill", PREFILL_TOKENS / (time.perf_counter() - began)


def _ratios(rates: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    theirs = rates.get("llama_cpp")
    if not theirs:
        return {}
    return {
        name: {
            workload: spread(ratios(values, theirs[workload])) for workload, values in by.items()
        }
        for name, by in rates.items()
        if name != "llama_cpp"
    }
