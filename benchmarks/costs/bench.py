"""Seconds of each part of a step on this machine, fitted as the services fit them.

The result is the performance model of one model on one device, with error bars, as the simulator
reads it. The code that serves is measured at the widths of published models, with random weights.
The parts are a few layers of attention, the experts of one layer on one worker, the head, and
transfers from the host. On a GPU, work is replayed from a CUDA graph after the caches are emptied.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common.models import DEEPSEEK_V2, QWEN3_30B, QWEN3_235B, write_model
from benchmarks.costs.parts import (
    Clock,
    Measurement,
    measure_attention,
    measure_experts,
    measure_fetching,
    measure_head,
)
from moesaic.costs import CostFit
from moesaic.messages.performance import PART_TERMS, Part, PartCost, PerformanceModel
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint

SHAPES = {"qwen3-30b-a3b": QWEN3_30B, "qwen3-235b-a22b": QWEN3_235B, "deepseek-v2": DEEPSEEK_V2}
NUM_LAYERS = 2  # of attention that are timed
VOCAB = 1024  # of the checkpoint: the head is measured by itself
REPEATS = 20


def run(quick: bool) -> dict[str, Any]:
    """Measure every part of every shape; on a CPU of the smallest alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    names = list(SHAPES) if device.type == "cuda" and not quick else list(SHAPES)[:1]
    clock = _device_clock(quick) if device.type == "cuda" else _host_clock(quick)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    figures: dict[str, Any] = {}
    series: dict[str, Any] = {}  # amounts and seconds
    for name in names:
        parts = _parts(SHAPES[name], dtype, device, clock, quick)
        measured = {part: list(found) for part, found in parts}
        fits: dict[str, PartCost] = {part: _fit(part, found) for part, found in measured.items()}
        model = PerformanceModel(
            device=device_name, source=f"moesaic bench costs, {name}, {dtype}", parts=fits
        )
        figures[name] = {
            "model": msgspec.to_builtins(model),
            "parts": {part: _quality(fits[part], found) for part, found in measured.items()},
            "activated_alone": _by_activated(measured["experts"]),
        }
        series[name] = {
            part: [[*amounts, seconds] for amounts, seconds in found]
            for part, found in measured.items()
        }
    return {
        "config": {"device": device_name, "dtype": str(dtype), "layers_timed": NUM_LAYERS},
        "figures": figures,
        "series": series,
        "notes": [
            "attention: of all layers of the model, scaled from those timed; experts: of one layer on one worker",
            "relative_error: of the fit to each measurement; a straight line where the device goes from reading "
            "weights to computing cannot do better",
            "activated_alone: of the time of one row an expert, the part that the number of activated experts explains "
            "(r squared), which JANUS section 2.3 says is nearly all",
            *(["quick: fewer cases and repeats, the same code path"] if quick else []),
        ],
    }


def _parts(
    shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device, clock: Clock, quick: bool
) -> Iterable[tuple[Part, Iterable[Measurement]]]:
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        model = Path(directory)
        few = {"num_hidden_layers": NUM_LAYERS, "vocab_size": VOCAB, "tie_word_embeddings": True}
        write_model(model, {**shape, **few}, with_experts=False)
        config = load_config(model)
        decoder = Decoder.load(Checkpoint(model), config, dtype, device)
        yield "attention", measure_attention(decoder, clock, shape["num_hidden_layers"], quick)
        del decoder
        yield "experts", measure_experts(config, dtype, device, clock, quick)
        yield "head", measure_head(shape, dtype, device, clock, quick)
        yield "fetching", measure_fetching(device, clock, quick)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fit(part: Part, found: Iterable[Measurement]) -> PartCost:
    """Fit as workers do, but forget nothing; each pass weighs by what the one before expects."""
    measurements = list(found)
    fit = CostFit(PART_TERMS[part], forget=1.0)
    for _ in range(3):
        expected, fit = fit.cost(), CostFit(PART_TERMS[part], forget=1.0)
        for amounts, seconds in measurements:
            fit.expect(expected)
            fit.add(amounts, seconds)
    return fit.cost()


def _quality(cost: PartCost, found: list[Measurement]) -> dict[str, Any]:
    errors = [cost.seconds(*amounts) / seconds - 1 for amounts, seconds in found]
    return {
        "unit_us": {
            term: round(1e6 * each, 6) for term, each in zip(cost.terms, cost.unit_s, strict=True)
        },
        "error_us": [
            round(1e6 * math.sqrt(max(0.0, cost.covariance[i][i])), 6)
            for i in range(len(cost.terms))
        ],
        "spread": round(cost.spread, 4),
        "relative_error": {
            "median": round(statistics.median(map(abs, errors)), 4),
            "worst": round(max(map(abs, errors)), 4),
        },
        "measurements": len(found),
    }


def _by_activated(found: list[Measurement]) -> dict[str, Any]:
    """Fit a line over the number of activated experts, one row each."""
    pairs = [(amounts[1], seconds) for amounts, seconds in found if amounts[1] == amounts[2]]
    counts, times = [float(n) for n, _ in pairs], [s for _, s in pairs]
    slope, intercept = statistics.linear_regression(counts, times)
    return {
        "r_squared": round(statistics.correlation(counts, times) ** 2, 5),
        "expert_us": round(1e6 * slope, 3),
        "fixed_us": round(1e6 * intercept, 3),
        "us": {str(n): round(1e6 * s, 2) for n, s in pairs},
    }


def _device_clock(quick: bool) -> Clock:
    from benchmarks.kernels.bench import Timer

    timer = Timer(REPEATS // 4 if quick else REPEATS)
    return lambda work: timer(work)[0] * 1e-6


def _host_clock(quick: bool) -> Clock:
    repeats = 3 if quick else 7

    def clock(work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    return clock
