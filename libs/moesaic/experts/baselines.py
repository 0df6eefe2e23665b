"""Policies of choosing a replica that exist to be compared with; in numpy, and slow."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.schedule import baselines
from moesaic.placement.schedule.aebs import NONE

BY_ROW = {  # rows of one expert may go to several workers
    "random-per-row": baselines.random_per_token,
    "token-balanced": baselines.token_balanced,
}
BY_BATCH = {  # all rows of an expert go to one worker
    "metro": baselines.metro,
    "random": baselines.random_per_expert,
}


def choose_by_row(
    scheduling: ExpertScheduling, topk_ids: NDArray[Any], held: NDArray[np.int32], seed: bytes
) -> NDArray[np.int32]:
    """Choose the worker of each choice.

    Args:
        scheduling: of ``BY_ROW``.
        topk_ids: int32 ``[T, k]``; -1 is nobody's choice.
        held: the replica of each expert on each worker, ``[E, N]``, -1: none.
        seed: random choices are drawn from it.

    Returns:
        int32 ``[T, k]``, -1 for what is nobody's choice.
    """
    real = topk_ids >= 0
    if real.all():
        return BY_ROW[scheduling](topk_ids, held, _rng(seed))
    served = np.full(topk_ids.shape, NONE, np.int32)
    served[real] = BY_ROW[scheduling](topk_ids[real][:, None], held, _rng(seed))[:, 0]
    return served


def choose_by_batch(
    scheduling: ExpertScheduling, topk_ids: NDArray[Any], held: NDArray[np.int32], seed: bytes
) -> NDArray[np.int32]:
    """Choose the worker of each expert that the batch has; arguments as above.

    Returns:
        int32 ``[E]``, -1 for experts that the batch has not.
    """
    if (real := topk_ids >= 0).any() and not real.all():
        topk_ids = topk_ids[real][:, None]
    elif not real.any():
        return np.full(len(held), NONE, np.int32)
    served = BY_BATCH[scheduling](topk_ids, held, _rng(seed))
    instance = np.full(len(held), NONE, np.int32)
    instance[topk_ids] = served
    return instance


def _rng(seed: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(seed, "little"))
