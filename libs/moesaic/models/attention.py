"""What the attention layers have in common: from queries to outputs over a planned step."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from moesaic.models.attention_plan import AttentionPlan, RowRun
from moesaic.models.kv_cache import KVCache
from moesaic.models.rope import Rotation


class AttentionLayer(Protocol):
    """The attention of one decoder layer."""

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """Write the rows' keys and values to the cache and attend: ``[T, H]`` -> ``[T, H]``."""


class Heads(Protocol):
    """How queries meet what one layer's cache holds."""

    def single(self, queries: Tensor, cached: Tensor, mask: Tensor) -> Tensor:
        """One row of each of ``B`` sequences: ``[B, heads, d]``, ``[B, L, kv_width]`` -> ``[B, O]``."""

    def run(self, queries: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """The rows of one sequence: ``[n, heads, d]``, ``[L, kv_width]`` -> ``[n, O]``; mask as in ``RowRun``."""


def attend(
    heads: Heads, queries: Tensor, plan: AttentionPlan, cache: KVCache, layer: int
) -> Tensor:
    """The outputs ``[T, O]`` of the ``queries`` ``[T, heads, d]``; the cache holds this step's rows already."""
    if plan.single and not plan.runs:  # pure decode: the rows are already in order
        return heads.single(queries, cache.gather(layer, plan.single.slots), plan.single.mask)
    outputs = []
    for run in plan.runs:
        cached = cache.gather(layer, run.slots)
        outputs.append(_run(heads, queries[run.start : run.stop], cached, run))
    if not plan.single and len(outputs) == 1:
        return outputs[0]
    combined = queries.new_empty(queries.shape[0], outputs[0].shape[1])
    for run, output in zip(plan.runs, outputs, strict=True):
        combined[run.start : run.stop] = output
    if plan.single:
        cached = cache.gather(layer, plan.single.slots)
        combined[plan.single.rows] = heads.single(
            queries[plan.single.rows], cached, plan.single.mask
        )
    return combined


def _run(heads: Heads, queries: Tensor, cached: Tensor, run: RowRun) -> Tensor:
    before, after = run.padding
    if not (before or after):
        return heads.run(queries, cached, run.mask)
    padded = F.pad(queries, (0, 0, 0, 0, before, after))
    return heads.run(padded, cached, run.mask)[before : before + len(queries)]
