"""The group of each input, where files say it one by one."""

import torch
from torch import Tensor

from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.formats.parts import MatrixParts


def read_groups(
    parts: MatrixParts, part: str, weight_format: WeightFormat, num_in: int, groups: int
) -> Tensor | None:
    """Read int32 ``[in]`` of the tensor ``part``, if it is there; compressed-tensors writes -1 where it has no order.

    Returns:
        int64 ``[in]``; None: groups lie side by side.

    Raises:
        CheckpointError: it names groups that do not exist, or an order that config.json does not announce.
    """
    if parts.stored(part) is None:
        return None
    group_of = parts.codes(part, "I32", num_in).long()
    if part == "weight_g_idx" and bool((group_of == -1).all()):
        return None
    if not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise parts.error(part, f"expected groups from 0 to {groups - 1}")
    if torch.equal(group_of, torch.arange(num_in) // (weight_format.group or num_in)):
        return None
    if not weight_format.ordered:
        raise parts.error(
            part, "orders inputs by activation, but quantization_config does not say so"
        )
    return group_of
