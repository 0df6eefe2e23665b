"""Ways to choose among replicas to compare AEBS with, for workers by entry points ``moesaic.expert_schedulings``.

All have one signature: in go the experts of each row and the live replicas, out comes the serving
instance of every choice. Every activated expert must have a live replica.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.schedule.aebs import NONE, expert_tokens, replica_of_choice, schedule_experts
from moesaic.placement.schedule.serving import Choices, Choose
from moesaic_lab.scheduling.optimal import optimal_instances


def random_per_expert(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Draw a replica of each expert, the same one for all rows of the batch."""
    drawn = rng.random(replicas.shape)
    return _by_expert(topk_ids, np.where(replicas >= 0, drawn, -1.0).argmax(axis=1))


def random_per_token(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Draw a replica for each choice, without regard to the expert's other rows."""
    held = replicas[topk_ids] >= 0  # [T, k, N]
    served: Choices = np.where(held, rng.random(held.shape), -1.0).argmax(axis=2).astype(np.int32)
    return served


def token_balanced(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Take, choice by choice, the holder that has fewest rows yet, ties to the lowest.

    Rows of one expert spread over its replicas, as in systems that balance tokens.
    """
    holders = [np.flatnonzero(row >= 0).tolist() for row in replicas]
    rows = [0] * replicas.shape[1]
    served = []
    for expert in topk_ids.flatten().tolist():
        chosen = min(holders[expert], key=rows.__getitem__)
        rows[chosen] += 1
        served.append(chosen)
    return np.asarray(served, np.int32).reshape(topk_ids.shape)


def metro(topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator) -> Choices:
    """Send all rows of an expert to the holder with fewest activated experts, ties to fewest rows.

    After METRO (arXiv:2512.09277), which balances activated experts instead of tokens from what all
    rows chose. That experts with most rows choose first is our reading of it.
    """
    tokens = expert_tokens(topk_ids, len(replicas))
    num_instances = replicas.shape[1]
    activated, rows = [0] * num_instances, [0] * num_instances
    instance = np.full(len(replicas), NONE, np.int32)
    for expert in np.argsort(-tokens, kind="stable")[: np.count_nonzero(tokens)].tolist():
        holders = np.flatnonzero(replicas[expert] >= 0).tolist()
        chosen = min(holders, key=lambda n: (activated[n], rows[n], n))
        activated[chosen] += 1
        rows[chosen] += int(tokens[expert])
        instance[expert] = chosen
    return _by_expert(topk_ids, instance)


def first(topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator) -> Choices:
    """Take the replica on the lowest instance, always, as a system that never chooses does."""
    return _by_expert(topk_ids, (replicas >= 0).argmax(axis=1))


def id_order(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Schedule by AEBS as the paper prints it: experts with several replicas choose by id."""
    return _by_expert(topk_ids, _greedy(topk_ids, replicas, by_id=True))


def fewest_first(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Schedule by AEBS with fewest replicas first, and improve nothing afterwards."""
    return _by_expert(topk_ids, _greedy(topk_ids, replicas, by_id=False))


def _greedy(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], *, by_id: bool
) -> NDArray[np.int32]:
    """Let experts choose the holder with fewest experts yet: those with one replica, then by id or by replicas."""
    num_replicas = (replicas >= 0).sum(axis=1)
    experts = np.flatnonzero(expert_tokens(topk_ids, len(replicas)))
    rank = num_replicas[experts] > 1 if by_id else num_replicas[experts]
    instance = np.full(len(replicas), NONE, np.int32)
    activated = [0] * replicas.shape[1]
    for expert in experts[np.argsort(rank, kind="stable")].tolist():
        chosen = min(np.flatnonzero(replicas[expert] >= 0).tolist(), key=activated.__getitem__)
        activated[chosen] += 1
        instance[expert] = chosen
    return instance


def aebs(topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator) -> Choices:
    """Schedule by AEBS as it serves here."""
    return _by_expert(topk_ids, schedule_experts(topk_ids, replicas).instance)


def optimum(
    topk_ids: NDArray[Any], replicas: NDArray[np.int32], rng: np.random.Generator
) -> Choices:
    """Schedule for the least possible largest count, exactly."""
    activated = expert_tokens(topk_ids, len(replicas)) > 0
    return _by_expert(topk_ids, optimal_instances(activated, replicas))


SCHEDULES: dict[str, Choose] = {
    "random_per_expert": random_per_expert,
    "random_per_token": random_per_token,
    "token_balanced": token_balanced,
    "metro": metro,
    "first": first,
    "id_order": id_order,
    "fewest_first": fewest_first,
    "aebs": aebs,
    "optimum": optimum,
}


def _by_expert(topk_ids: NDArray[Any], instance: NDArray[Any]) -> Choices:
    return replica_of_choice(topk_ids, instance.astype(np.int32))
