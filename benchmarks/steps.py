"""One decode step of a model on a GPU, kernel by kernel and captured: exact, under brownout, and in segments.

Segments are the steps of an attention worker whose experts are elsewhere. Here nobody computes these, but rows are
copied to the host and back, as by a dispatcher that sends them. All times are the host's, whose work a captured step
saves.
"""

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.models import QWEN3_30B, write_model
from benchmarks.common.suite import DEMO
from moesaic.brownout.split import Level
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.dispatch.local import LocalDispatcher
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decode_graphs import DecodeGraphs, DegradedLayer, at_once
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

BLOCK_SIZE = 16
LAYERS = 4  # of the wide model
CONTEXT = 512  # tokens of each row
ROWS = (1, 16, 64)
THRESHOLD = 0.0  # of degraded steps: the least exact
DEGRADED = {
    "fewer": Substitution(instead="fewer"),
    "united": Substitution(way=4, instead="united"),
}
Clock = Callable[[Callable[[], object]], float]  # microseconds of work, the median of some
Compute = Callable[[StepBatch], Tensor]


def run(quick: bool) -> dict[str, Any]:
    """Time steps of the demo model, and of few layers of Qwen3-30B-A3B unless it is to be quick."""
    if not torch.cuda.is_available():
        raise CommandError(
            "steps needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    device, clock = torch.device("cuda", 0), _clock(10 if quick else 50)
    figures = {"demo": measured(DEMO, device, clock)}
    if not quick:
        with tempfile.TemporaryDirectory() as directory:
            few = {"num_hidden_layers": LAYERS, "vocab_size": 32_768}
            write_model(Path(directory), {**QWEN3_30B, **few}, device="cuda")
            figures[f"qwen3-30b-a3b, {LAYERS} layers"] = measured(Path(directory), device, clock)
    return {
        "config": {
            "device": torch.cuda.get_device_name(),
            "dtype": "bfloat16",
            "context": CONTEXT,
            "threshold": THRESHOLD,
        },
        "figures": figures,
        "notes": [
            "gain: eager_us over captured_us; difference: the largest of all logits of both",
            "exact, fewer and united: with all experts here; united experts of way 4 stand in for degraded choices",
            "segments: without experts, rows go to the host and back in each layer",
            *(["quick: fewer repeats, and the demo model alone"] if quick else []),
        ],
    }


def measured(
    model: Path,
    device: torch.device,
    clock: Clock,
    all_rows: Sequence[int] = ROWS,
    context: int = CONTEXT,
) -> dict[str, Any]:
    """Time steps of a model, by kind and number of rows, each of ``context`` tokens."""
    dtype, config, most = torch.bfloat16, load_config(model), max(all_rows)
    checkpoint = Checkpoint(model)
    with torch.inference_mode():
        decoder = Decoder.load(checkpoint, config, dtype, device)
        dispatcher = LocalDispatcher(checkpoint, config, dtype, device)
        cache = decoder.new_kv_cache(most * -(-context // BLOCK_SIZE), BLOCK_SIZE)
        for layer in range(config.num_layers):
            cache.rows(layer).normal_(std=0.1)
        exact = partial(dispatcher.dispatch, dispatcher.begin_step())
        graphs = DecodeGraphs(decoder, cache, exact, most, context)
        segments = DecodeSegments(decoder, cache, most, context)

        def eagerly(batch: StepBatch) -> Tensor:
            return at_once(decoder.forward(batch, cache, exact))

        def without_experts(batch: StepBatch) -> Tensor:
            return at_once(decoder.forward(batch, cache, _by_the_host))

        def in_segments(batch: StepBatch) -> Tensor:
            return at_once(segments.forward(batch, _by_the_host))

        batch_of = partial(_batch, context=context, vocab_size=config.vocab_size)
        found = {"exact": _beside(clock, eagerly, graphs.forward, batch_of, all_rows)}
        for name, substitution in DEGRADED.items():
            dispatcher.adopt(dispatcher.substitutions.load(substitution))
            degrading = partial(dispatcher.dispatch, dispatcher.begin_step())

            def degraded(batch: StepBatch, degrading: DegradedLayer = degrading) -> Tensor:
                promised = batch.promised
                assert promised is not None

                def moe(layer: int, hidden: Tensor) -> Awaitable[Tensor]:
                    return degrading(layer, hidden, promised.enter(layer))

                return at_once(decoder.forward(batch, cache, moe))

            promising = partial(batch_of, promised_on=device, num_layers=config.num_layers)
            captured = graphs.degrading(degrading).forward
            found[name] = _beside(clock, degraded, captured, promising, all_rows)
        found["segments"] = _beside(clock, without_experts, in_segments, batch_of, all_rows)
    return found


def _beside(
    clock: Clock,
    eager: Compute,
    captured: Compute,
    batch_of: Callable[[int], StepBatch],
    all_rows: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Time both forms of a step by rows; what they promise is settled, as an engine does it."""

    def step(compute: Compute, rows: int) -> tuple[Tensor, float]:
        batch = batch_of(rows)
        logits = compute(batch)
        if batch.promised is None:
            return logits, 0.0
        return logits, float(batch.promised.settle().sum())

    found = {}
    for rows in all_rows:
        (one, degraded), (other, same) = step(eager, rows), step(captured, rows)
        eager_us, captured_us = (
            clock(partial(step, compute, rows)) for compute in (eager, captured)
        )
        found[f"{rows}_rows"] = {
            "eager_us": round(eager_us, 1),
            "captured_us": round(captured_us, 1),
            "gain": round(eager_us / captured_us, 3),
            "difference": float((one - other).abs().max()),
            "degraded_choices": degraded,
            "degraded_choices_captured": same,
        }
    return found


async def _by_the_host(layer: int, hidden: Tensor) -> Tensor:
    return hidden.cpu().to(hidden.device)


def _batch(
    num_rows: int,
    context: int,
    vocab_size: int,
    promised_on: torch.device | None = None,
    num_layers: int = 1,
) -> StepBatch:
    """Decode the last of ``context`` tokens of each row; with ``promised_on`` at threshold ``THRESHOLD``."""
    blocks = -(-context // BLOCK_SIZE)
    promised = None
    if promised_on is not None:
        levels = torch.zeros(num_rows, dtype=torch.uint8)
        promised = PromisedRows([Level(THRESHOLD, 1)], levels, promised_on, num_layers)
    return StepBatch(
        token_ids=[7 * row % vocab_size for row in range(num_rows)],
        positions=[context - 1] * num_rows,
        sequence_rows=[1] * num_rows,
        block_tables=[list(range(row * blocks, (row + 1) * blocks)) for row in range(num_rows)],
        wanted=[1] * num_rows,
        promised=promised,
    )


def _clock(repeats: int) -> Clock:
    def clock(work: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return 1e6 * statistics.median(times)

    return clock
