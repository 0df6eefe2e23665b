"""The calibration run: real steps, timed layer by layer."""

import torch

from moesaic.costs import CostFit
from moesaic.dispatch.gathered.assembly import GatheredParts
from moesaic.dispatch.gathered.calibration import Calibration, rows_to_hide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch

BLOCK_SIZE = 16
FEWER = 4  # the smaller of the two steps, as a part of the larger
REPEATS = 2  # of each; the first of all also fills caches and compiles


async def calibrate(
    decoder: Decoder, gathered: GatheredParts, rows: int
) -> tuple[Calibration, float]:
    """Run prefill steps of up to ``rows`` rows, on the engine's event loop, before the engine does.

    Returns:
        The times of the larger ones, and the rows of a step that hides the slowest transfer
        (infinite if no step would).
    """
    fewer = max(1, rows // FEWER)
    small, large = [], []
    for _ in range(REPEATS):
        small.append(await _measure(decoder, gathered, fewer))
        large.append(await _measure(decoder, gathered, rows))
    best = Calibration(
        rows,
        tuple(map(min, *(each.compute_s for each in large))),
        tuple(map(min, *(each.transfer_s for each in small + large))),
    )
    slowest_s = max(best.transfer_s, default=0.0)
    if not slowest_s or rows == fewer:
        return best, 0.0
    # A layer's time ends where the next one's experts are due, after its attention: the last has none.
    whole = slice(1, -1) if len(best.compute_s) > 2 else slice(1, None)
    layer = CostFit(("layer", "row"), forget=1.0)
    for each in (*small, *large):
        layer.add((1, each.rows), min(each.compute_s[whole]))
    hiding = rows_to_hide(slowest_s, layer.cost())
    return best, float("inf") if hiding is None else hiding


async def _measure(decoder: Decoder, gathered: GatheredParts, rows: int) -> Calibration:
    dispatcher = gathered.dispatcher
    batch, num_blocks = prompts(rows, decoder.config.max_positions, decoder.config.vocab_size)
    cache = decoder.new_kv_cache(num_blocks, BLOCK_SIZE)
    step = dispatcher.begin_step()
    try:
        await decoder.forward(
            batch,
            cache,
            lambda layer, hidden: dispatcher.dispatch(step, layer, hidden),
            every_row=True,
        )
    finally:
        dispatcher.end_step(step)
    plan, transfer_s = gathered.plan, gathered.mover.transfer_s
    if plan.num_buffers == len(plan.gathered_layers):
        # There is room for all layers: what has come once stays.
        transfer_s = {}
    times = tuple(transfer_s.get(layer, 0.0) for layer in plan.gathered_layers)
    return Calibration(rows, dispatcher.compute_s, times)


def prompts(rows: int, longest: int, vocab_size: int) -> tuple[StepBatch, int]:
    """A step of random prompts, as long as the model takes, and the KV blocks that it needs."""
    lengths = [min(longest, rows - start) for start in range(0, rows, longest)]
    tables, next_block = [], 0
    for length in lengths:
        needed = -(-length // BLOCK_SIZE)
        tables.append(list(range(next_block, next_block + needed)))
        next_block += needed
    generator = torch.Generator().manual_seed(0)
    batch = StepBatch(
        token_ids=torch.randint(0, vocab_size, (rows,), generator=generator).tolist(),
        positions=[position for length in lengths for position in range(length)],
        sequence_rows=lengths,
        block_tables=tables,
        wanted=[0] * (len(lengths) - 1) + [1],
    )
    return batch, next_block
