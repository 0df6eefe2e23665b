# The split of choices: in place, before experts are assigned or computed.
#   Layout     choices [T, k] row by row; promises to rows by level.
#   Cost       T k counts and T k looks; sorts the experts that were chosen, for each phase.
#   Reference  moesaic.brownout.split, to the last bit.
"""The split of choices on tensors; ``moesaic.brownout.split`` says what it decides."""

import torch
from torch import Tensor

from moesaic.brownout import split
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.native import library


def split_choices(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, layer: LayerSubstitution
) -> None:
    """Split choices in place, as ``moesaic.brownout.split.split_choices``, to the last bit.

    Args:
        topk_ids: int32 ``[T, k]``, contiguous, each in ``0..num_experts-1``, different in a row.
        topk_weights: float32 ``[T, k]``, contiguous, on the same device.
        promised: the rows; counts what is degraded.
        layer: the layer that they pass.
    """
    if topk_ids.is_cuda:
        from moesaic.kernels.triton import brownout as brownout_triton

        brownout_triton.split_choices(topk_ids, topk_weights, promised, layer)
        return
    assert len(topk_ids) == len(promised)
    assert topk_ids.dtype == torch.int32
    assert topk_ids.is_contiguous()
    assert topk_weights.is_contiguous()
    if library.library() is None:
        _in_numpy(topk_ids, topk_weights, promised, layer)
        return
    lib = library.lib()
    lib.split_choices(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        count=len(topk_ids),
        top_k=topk_ids.shape[1],
        substitution=layer.c,
        promises=promised.c,
        degraded=promised.counts.data_ptr(),
        scratch=library.scratch(lib.split_choices_scratch(num_experts=layer.num_experts)),
    )


def _in_numpy(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, layer: LayerSubstitution
) -> None:
    choices = split.split_choices(
        topk_ids.numpy(),
        topk_weights.numpy(),
        list(promised.levels),
        promised.level_of_row.numpy(),
        layer.layer,
    )
    topk_ids.copy_(torch.from_numpy(choices.ids))
    topk_weights.copy_(torch.from_numpy(choices.weights))
    promised.note(torch.from_numpy(choices.degraded))
