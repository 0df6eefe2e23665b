"""Warm-up of a decoder: made-up steps of every kind and size, computed as real ones are.

They have a small KV cache of their own, which all layers and all sequences share: what they write is
read by nobody else.
"""

import asyncio
from collections.abc import Iterator

import torch
from torch import Tensor

from moesaic.kernels.sampling import PickRules, pick_tokens
from moesaic.kernels.warm_up import row_counts, warming
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.step_batch import StepBatch

SETTING = "--max-num-batched-tokens"
LONG = 2048  # tokens: longer than what one program attends to
FEW_ROWS = 16  # of a sequence: more are never attended to in pieces
CHUNK = 8 * FEW_ROWS  # but where their tiles do not fill the GPU; longer chunks have tiles alike


async def experts_elsewhere(layer: int, hidden_states: Tensor) -> Tensor:
    """Stand in for experts in other processes."""
    return torch.zeros_like(hidden_states)


async def warm_up(
    decoder: Decoder, moe: MoELayer, most_rows: int, most_sequences: int, block_size: int
) -> None:
    """Compute steps of up to these numbers of rows and sequences; ends early if cancelled.

    Raises:
        InvalidInput: there is too little memory.
    """
    config, device = decoder.config, decoder.device
    longest = max(min(most_rows, config.max_positions), min(LONG, config.max_positions))
    with warming(device, SETTING, f"got {most_rows}, and a step of so many rows"):
        cache = decoder.new_kv_cache(-(-longest // block_size), block_size, one_for_all=True)
        for batch in batches(most_rows, most_sequences, config.max_positions, block_size):
            batch.token_ids = [token % config.vocab_size for token in batch.token_ids]
            await decoder.forward(batch, cache, moe)
            await asyncio.sleep(0)
        # One kernel has all rules.
        pick_tokens(torch.zeros(1, config.vocab_size, device=device), [PickRules(1.0)])


def batches(
    most_rows: int, most_sequences: int, max_positions: int, block_size: int
) -> Iterator[StepBatch]:
    """Make up the steps: prompts, chunks after a long context, decoded rows with short and long ones."""
    long = min(LONG, max_positions)
    for count in row_counts(most_rows):
        whole, rest = divmod(count, max_positions)
        yield _batch([max_positions] * whole + [rest] * bool(rest), 0, block_size)
        if count <= min(CHUNK, long):
            yield _batch([count], long - count, block_size)
    for count in row_counts(min(most_sequences, most_rows)):
        for start in (0, long - 1):
            yield _batch([1] * count, start, block_size)


def _batch(counts: list[int], start: int, block_size: int) -> StepBatch:
    """Begin all sequences at ``start`` and in the same blocks."""
    positions = [start + i for count in counts for i in range(count)]
    return StepBatch(
        token_ids=list(range(len(positions))),
        positions=positions,
        sequence_rows=counts,
        block_tables=[list(range(-(-(start + count) // block_size))) for count in counts],
        wanted=[1] * len(counts),
    )
