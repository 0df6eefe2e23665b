"""The area of sweeps: hidden states of prompts that pass layer by layer, and one layer's keys and values.

All rows pass a layer before any passes the next, so the next layer may write over the keys and
values of the last. The number of rows computed at a time changes nothing in the result.
"""

import torch
from torch import Tensor

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.layers.attention_plan import plan_attention
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.step_batch import StepBatch


class SweepArea:
    """Room for the rows of ``num_blocks`` blocks. The block table of its sequence says where a row lies."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        """Reserve ``num_blocks * block_bytes(...)`` bytes."""
        config, dtype, device = decoder.config, decoder.dtype, decoder.device
        self._decoder = decoder
        self._cache = decoder.new_kv_cache(num_blocks, block_size, one_for_all=True)
        self._hidden = torch.zeros(  # [rows, H]: output of the last layer that a row has passed
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
        """Take the rows of ``batch`` through one layer; through the last, those whose logits are wanted.

        Earlier rows of their sequences have passed it before, or do so in this call. A call that
        fails may be made again.
        """
        decoder, device = self._decoder, self._decoder.device
        plans = plan_attention(batch, self._cache.block_size, device)
        plan = plans.last if layer == decoder.config.num_layers - 1 else plans.layer
        token_ids, positions = batch.on(device)
        entered = layer > 0
        hidden = (
            self._hidden.index_select(0, plan.write_offsets)
            if entered
            else decoder.embed(token_ids)
        )
        hidden = await decoder.compute_layer(layer, hidden, positions, plan, self._cache, moe)
        passed = (
            plan.write_offsets if plan.attending is None else plan.write_offsets[plan.attending]
        )
        self._hidden.index_copy_(0, passed, hidden)

    def hidden(self, rows: list[int]) -> Tensor:
        """Return the outputs of the last layer, ``[R, H]``, of wanted rows that have passed all layers."""
        where = torch.tensor(rows, dtype=torch.int64, device=self._hidden.device)
        return self._hidden.index_select(0, where)
