"""The ways that tensors of a GPU take, for tensors of the CPU: the kernels are interpreted."""

from typing import Any

import pytest
from torch import Tensor

from moesaic.dispatch import local
from moesaic.experts import answering, slots
from moesaic.kernels import aebs
from moesaic.kernels.triton import add_rms_norm as add_rms_norm_triton
from moesaic.kernels.triton import aebs as aebs_triton
from moesaic.kernels.triton import brownout as brownout_triton
from moesaic.kernels.triton import kv_rows as kv_rows_triton
from moesaic.kernels.triton import split_attention
from moesaic.models.layers import attention_plan, decoder, gating, grouped_query, latent


def take_the_ways_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels from now on. Weights that are loaded from now on stay as a GPU has them."""
    monkeypatch.setattr("moesaic.native.library.library", lambda: None)
    monkeypatch.setattr("moesaic.native.library.IN_FLOATS", ())
    monkeypatch.setattr("moesaic.kernels.coded_matrix.KEEPS_CODES", ("cpu", "cuda"))

    def compute_slots(
        table: slots.SlotTable,
        layer: int,
        hidden_states: Tensor,
        topk_weights: Tensor,
        slot_ids: Tensor,
    ) -> Tensor:
        parts = hidden_states, topk_weights, slot_ids
        return slots.compute_on_gpu(*parts, table.layers[layer])

    def store_grouped(*arguments: Any, **options: Any) -> Tensor:
        # The size of blocks is for CPUs.
        return kv_rows_triton.store_grouped(*arguments[:-1], **options)

    monkeypatch.setattr(decoder, "add_rms_norm", add_rms_norm_triton.add_rms_norm)
    monkeypatch.setattr(grouped_query, "store_grouped", store_grouped)
    monkeypatch.setattr(latent, "store_latent", kv_rows_triton.store_latent)
    monkeypatch.setattr(latent, "rotate", kv_rows_triton.rotate)
    monkeypatch.setattr(gating.Gating, "select", gating.Gating.select_on_gpu)
    monkeypatch.setattr(slots.SlotTable, "compute_slots", compute_slots)
    monkeypatch.setattr(attention_plan, "paged_attention", split_attention.paged_attention)
    monkeypatch.setattr(aebs, "schedule_experts", aebs_triton.schedule_experts)
    for module in (local, answering):
        monkeypatch.setattr(module, "split_choices", brownout_triton.split_choices)
