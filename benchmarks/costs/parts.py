"""Measurements of the parts of a step, by the code that serves."""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.gated_mlp import make_mlp
from moesaic.kernels.linear import make_linear
from moesaic.kernels.rms_norm import rms_norm
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.layers.attention_plan import plan_attention
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch

BLOCK_SIZE = 16
MOST_EXPERT_BYTES = 6 << 30
Clock = Callable[[Callable[[], object]], float]  # seconds of work, the median of some
Measurement = tuple[tuple[float, ...], float]  # amounts of the terms, seconds


def measure_attention(
    decoder: Decoder, clock: Clock, whole_layers: int, quick: bool
) -> Iterator[Measurement]:
    """Time steps of a few layers without experts, and give what they would take in ``whole_layers``.

    Decoding rows with contexts of several lengths, and chunks of prompts after contexts.
    """
    device, num_layers = decoder.device, decoder.config.num_layers
    decodes = [(rows, length) for rows in (1, 4, 16, 64, 256) for length in (256, 2048, 8192)]
    chunks = [(rows, behind) for rows in (64, 256, 1024, 2048) for behind in (0, 2048)]
    if quick:
        decodes, chunks = decodes[::4], chunks[::3]
    largest = max(rows * -(-length // BLOCK_SIZE) for rows, length in decodes)
    cache = decoder.new_kv_cache(largest, BLOCK_SIZE)
    steps = [([1] * rows, length - 1) for rows, length in decodes]
    steps += [([rows], behind) for rows, behind in chunks]
    for counts, start in steps:
        batch = _batch(counts, start, decoder.config.vocab_size)
        plan = plan_attention(batch, BLOCK_SIZE, device)
        token_ids, positions = batch.on(device)

        def work(plan: Any = plan, ids: Tensor = token_ids, at: Tensor = positions) -> None:
            _run(decoder.compute(ids, at, plan, cache, _no_experts))

        seconds = clock(work)
        keys = sum(position + 1 for position in batch.positions)
        seen = (keys, 0) if max(counts) == 1 else (0, keys)
        yield (1, sum(counts), *seen), seconds / num_layers * whole_layers


def measure_experts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock,
    quick: bool,
) -> Iterator[Measurement]:
    """Time one layer's batch on one worker, by activated experts and rows of each."""
    hidden, size = config.hidden_size, config.moe.expert_size
    expert_bytes = 3 * hidden * size * dtype.itemsize
    most = min(config.moe.num_experts, MOST_EXPERT_BYTES // expert_bytes, 8 if quick else 64)
    mlps = [
        make_mlp(_made(dtype, device, 2 * size, hidden), _made(dtype, device, hidden, size), "none")
        for _ in range(most)
    ]
    table = SlotTable({0: LayerSlots(tuple(range(most)), tuple(mlps))})
    activated = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= most]
    for count in activated:
        for each in (1, 16) if quick else (1, 4, 16, 64):
            rows = _made(dtype, device, count * each, hidden)
            slots = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(each)
            weights = torch.ones(count * each, 1, device=device)

            def work(
                rows: Tensor = rows, weights: Tensor = weights, slots: Tensor = slots[:, None]
            ) -> None:
                table.compute_slots(0, rows, weights, slots)

            yield (1, count, count * each), clock(work)


def measure_head(
    shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device, clock: Clock, quick: bool
) -> Iterator[Measurement]:
    """Time the logits of this number of rows over the whole vocabulary."""
    hidden = shape["hidden_size"]
    head = make_linear(_made(dtype, device, shape["vocab_size"], hidden))
    norm = torch.ones(hidden, dtype=dtype, device=device)
    for num_rows in (1, 16) if quick else (1, 4, 16, 64, 256):
        rows = _made(dtype, device, num_rows, hidden)

        def work(rows: Tensor = rows) -> None:
            head(rms_norm(rows, norm, 1e-6)).float()

        yield (1, num_rows), clock(work)


def measure_fetching(device: torch.device, clock: Clock, quick: bool) -> Iterator[Measurement]:
    """Time the transfer of this number of bytes from the host's memory to the device; on a CPU a copy."""
    sizes = (1 << 20, 1 << 24, 1 << 26) if quick else (1 << 16, 1 << 20, 1 << 22, 1 << 25, 1 << 28)
    for nbytes in sizes:
        source = torch.empty(nbytes, dtype=torch.int8, pin_memory=device.type == "cuda").fill_(1)
        target = torch.empty(nbytes, dtype=torch.int8, device=device)

        def work(source: Tensor = source, target: Tensor = target) -> None:
            target.copy_(source, non_blocking=True)

        yield (1, nbytes), clock(work)


async def _no_experts(layer: int, hidden_states: Tensor) -> Tensor:
    """Stand in for experts elsewhere, at no cost."""
    return hidden_states


def _run(step: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that waits for nothing: without an event loop it can be captured in a graph."""
    try:
        step.send(None)
    except StopIteration:
        return
    raise AssertionError("the step waited for something")


def _batch(counts: Sequence[int], start: int, vocab_size: int) -> StepBatch:
    """Begin all sequences at ``start``, each in blocks of its own."""
    blocks = iter(range(1 << 30))
    positions = [start + i for count in counts for i in range(count)]
    return StepBatch(
        token_ids=[i % vocab_size for i in range(len(positions))],
        positions=positions,
        sequence_rows=list(counts),
        block_tables=[
            [next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE))] for count in counts
        ],
        wanted=[1] * len(counts),
    )


def _made(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Make random numbers: zeros would be faster than real data."""
    return torch.randn(*shape, dtype=dtype, device=device).mul_(0.02)
