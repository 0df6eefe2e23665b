"""Adds up a row's experts one by one: with ``--deterministic``, bits do not depend on placement.

A worker's partial sum is over its own experts, so another placement gives other last bits. Unsummed
workers send the result of each choice of a row, unweighted, and the asking side adds up. It takes
each row's experts in ascending order, by the kernel of ``local``, so the bits are those of
``local``. Replies are as many times larger as a row has experts on a worker.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.experts.frames import decision_of
from moesaic.kernels.grouped_experts import sum_of_choices
from moesaic.transport.frame import MAX_ROWS, Frame


def rows_at_once(top_k: int) -> int:
    """Rows whose choices fit one reply, if one worker has them all."""
    return max(1, MAX_ROWS // top_k)


def add_up_choices(
    layer: int, replies: Sequence[Frame], topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """The weighted sum of each row's experts, in ascending order of these.

    Args:
        layer: the decoder layer.
        replies: each with results float32 ``[n, H]`` and their places, int64 ``[n, 1]``, among the
            ``T * k`` choices, row by row.
        topk_weights: float32 ``[T, k]``.
        topk_ids: int32 ``[T, k]``; -1 is nobody's choice, without a result.

    Returns:
        float32 ``[T, H]``.

    Raises:
        ExpertUnavailable: some choice has no result, or several.
    """
    places = torch.cat([reply.tensors[1][:, 0] for reply in replies])
    whole = torch.equal(places.sort().values, (topk_ids.flatten() >= 0).nonzero().flatten())
    if not whole or len({decision_of(reply) for reply in replies}) > 1:
        raise ExpertUnavailable(layer, cause="its workers hold different placements")
    results = torch.cat([reply.tensors[0] for reply in replies])
    of_choice = results.new_zeros(topk_ids.numel(), results.shape[1])
    of_choice[places] = results
    return sum_of_choices(of_choice, topk_weights, topk_ids)
