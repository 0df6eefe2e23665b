"""Rows' experts one by one: with ``--deterministic``, a sum does not depend on who computed what.

A worker's partial sum is over the experts that are placed there, so another placement gives other last bits.
Here workers send what each choice of a row gives, unweighted and unsummed, and the asking side adds up: each
row's experts in ascending order, by the kernel that does it in ``local``, whose bits these are. Replies are as
many times larger as a row has experts on a worker.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.kernels.grouped_experts import sum_of_choices
from moesaic.transport.frame import MAX_ROWS, Frame

UNSUMMED = 1  # flag of a request that has the sender's own choice of experts


def rows_at_once(top_k: int) -> int:
    """Rows whose choices fit one reply, if one worker has them all."""
    return max(1, MAX_ROWS // top_k)


def is_unsummed(reply: Frame, hidden_size: int) -> bool:
    """Whether ``reply`` has results float32 ``[n, H]`` and whose they are, int64 ``[n, 1]``."""
    if len(reply.tensors) != 2:
        return False
    results, places = reply.tensors
    shapes = [list(results.shape), list(places.shape)]
    return (results.dtype, places.dtype) == (torch.float32, torch.int64) and shapes == [
        [len(results), hidden_size],
        [len(results), 1],
    ]


def add_up_choices(
    layer: int, replies: Sequence[Frame], topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """The weighted sum of each row's experts, in ascending order of these.

    Args:
        layer: the decoder layer.
        replies: each with results float32 ``[n, H]`` and whose they are: int64 ``[n, 1]``, of the ``T * k`` choices
            row by row.
        topk_weights: float32 ``[T, k]``.
        topk_ids: int32 ``[T, k]``.

    Returns:
        float32 ``[T, H]``.

    Raises:
        ExpertUnavailable: some choice has no result, or several.
    """
    num_choices = topk_ids.numel()
    places = torch.cat([reply.tensors[1][:, 0] for reply in replies])
    whole = torch.equal(places.sort().values, torch.arange(num_choices))
    if not whole or len({reply.digest for reply in replies}) > 1:
        raise ExpertUnavailable(layer, cause="its workers hold different placements")
    results = torch.cat([reply.tensors[0] for reply in replies])
    result_of = torch.empty(num_choices, dtype=torch.int64)
    result_of[places] = torch.arange(num_choices)
    return sum_of_choices(results[result_of], topk_weights, topk_ids)
