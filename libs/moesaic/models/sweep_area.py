"""Where prompts are computed layer by layer: their hidden states, and one layer's keys and values.

All rows pass a layer before any passes the next, so what a layer keeps of them can be written over
by the next layer. How many rows are computed at a time changes nothing of what comes out.
"""

import torch
from torch import Tensor

from moesaic.models.architecture import ModelConfig
from moesaic.models.attention_plan import plan_attention
from moesaic.models.decoder import Decoder, MoELayer
from moesaic.models.kv_cache import KVCache
from moesaic.models.step_batch import StepBatch


class SweepArea:
    """Room for the rows of ``num_blocks`` blocks. A row lies where the block table of its sequence
    has its position."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        """Reserve ``num_blocks * block_bytes(...)`` bytes."""
        config, dtype, device = decoder.config, decoder.dtype, decoder.device
        self._decoder = decoder
        self._cache = KVCache(config, num_blocks, block_size, dtype, device, one_for_all=True)
        self._hidden = torch.zeros(  # [rows, H]: what comes out of the layer that a row has passed
            num_blocks * block_size, config.hidden_size, dtype=dtype, device=device
        )

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
        """Bytes of one block: hidden states, and keys and values of one layer."""
        return block_size * (config.hidden_size + config.kv_width) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._cache.nbytes + self._hidden.nbytes

    async def compute(self, layer: int, batch: StepBatch, moe: MoELayer) -> None:
        """Take the rows of ``batch`` through one layer; through the last, those whose logits are
        wanted. Those before them in their sequences have passed it, at the latest in this call; where
        it fails, it can be called again."""
        decoder, device = self._decoder, self._decoder.device
        plans = plan_attention(batch, self._cache.block_size, decoder.window, device)
        plan = plans.last if layer == decoder.config.num_layers - 1 else plans.layer
        token_ids, positions = batch.on(device)
        entered = layer > 0
        hidden = (
            self._hidden.index_select(0, plan.write_slots) if entered else decoder.embed(token_ids)
        )
        hidden = await decoder.compute_layer(layer, hidden, positions, plan, self._cache, moe)
        passed = plan.write_slots if plan.attending is None else plan.write_slots[plan.attending]
        self._hidden.index_copy_(0, passed, hidden)

    def logits(self, rows: list[int]) -> Tensor:
        """float32 ``[R, vocab]``: next-token logits of rows that have passed all layers, and had been
        wanted."""
        where = torch.tensor(rows, dtype=torch.int64, device=self._hidden.device)
        return self._decoder.logits(self._hidden.index_select(0, where))
