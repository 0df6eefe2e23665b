"""The split of one layer's chosen experts: those computed exactly, and those served by united ones.

In brownout (BrownoutServe section IV, algorithm 1) the most popular experts stay. The others give their
rows to the united expert of their group, or are dropped. The paper's listing has its comparison the
wrong way round (line 10); its prose and figure 5 are followed. The split is deterministic: ties go to
the lowest id, and shares are compared as integers. So processes that see the same rows split them alike.

Terms:

* A *choice* is one row's pick of one expert. It is *degraded* if another expert, or none, serves it.
* A *level* is a promise to some rows. In a batch of these rows alone, the most popular experts that have
  at least this share of all choices would stay. 1 promises every expert. Rows of one phase share their
  counts.
* An expert that a promise keeps for any row stays for all: its weights are read anyway.
* Experts are *in order* by the number of rows that choose them, as in the paper. The rule ``instances``
  takes the most popular one of each instance first, then the second of each, and so on. So the busiest
  instance gives up most experts, and a layer takes as long as its busiest instance.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.substitution import Substitution

NOBODY = -1
MAX_LEVELS = 255
WHOLE = 10_000  # thresholds are counted in parts of it, so that all processes compare alike


@dataclass(frozen=True)
class Level:
    """A promise to some rows of a batch.

    Attributes:
        threshold: share of the choices whose experts stay, 0 to 1, in steps of 1/10,000.
        phase: rows of one phase are counted together.
    """

    threshold: float
    phase: int = 0

    @property
    def parts(self) -> int:
        """The threshold in parts of ``WHOLE``."""
        return round(self.threshold * WHOLE)


@dataclass(frozen=True)
class Choices:
    """The choices of a batch after the split.

    Attributes:
        ids: int32 ``[T, k]``: an expert, ``num_experts + j`` for united expert ``j``, or -1 if dropped.
        weights: float32 ``[T, k]``, 0 if dropped. A united expert's weight is the sum over the row's choices
            that it serves.
        degraded: int32 ``[T]``: choices of each row that their own experts do not serve.
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    degraded: NDArray[np.int32]


@dataclass(frozen=True)
class Layer:
    """Facts of one layer that the split depends on.

    Attributes:
        num_experts: number of experts, without united ones.
        substitution: how choices are degraded.
        lost: bool ``[num_experts]``: experts that no worker can serve now; None: there are none.
        homes: int32 ``[num_experts]``, at least 0: the instance of each expert; None: all are on one.
    """

    num_experts: int
    substitution: Substitution
    lost: NDArray[np.bool_] | None = None
    homes: NDArray[np.int32] | None = None


def split_choices(
    topk_ids: NDArray[np.int32],
    topk_weights: NDArray[np.float32],
    levels: list[Level],
    level_of_row: NDArray[np.uint8],
    layer: Layer,
) -> Choices:
    """Split the choices of a batch, expert by expert; the reference of ``moesaic.kernels.brownout``.

    Args:
        topk_ids: int32 ``[T, k]``, each in ``0..num_experts-1``, different in a row.
        topk_weights: float32 ``[T, k]``.
        levels: the promises, at most ``MAX_LEVELS``.
        level_of_row: uint8 ``[T]``, indices of ``levels``.
        layer: facts of the layer.
    """
    stay = staying(topk_ids, levels, level_of_row, layer)
    num_experts, way, instead = (
        layer.num_experts,
        layer.substitution.way,
        layer.substitution.instead,
    )
    there = np.ones(num_experts, dtype=bool) if layer.lost is None else ~layer.lost
    chosen = np.zeros(num_experts, dtype=bool)
    chosen[topk_ids] = True
    stay &= there
    if instead == "united":
        _keep_lone(stay, chosen, way)
        stay &= there
    ids, weights = topk_ids.copy(), topk_weights.copy()
    degraded = ~stay[topk_ids]
    if instead == "fewer":
        _keep_heaviest(degraded, there, topk_ids, topk_weights)
    for row in np.flatnonzero(degraded.any(axis=1)):
        if instead == "united":
            _unite(ids[row], weights[row], degraded[row], num_experts, way)
        else:
            _leave_out(ids[row], weights[row], degraded[row], same_sum=instead == "fewer")
    return Choices(ids, weights, degraded.sum(axis=1, dtype=np.int32))


def staying(
    topk_ids: NDArray[np.int32],
    levels: list[Level],
    level_of_row: NDArray[np.uint8],
    layer: Layer,
) -> NDArray[np.bool_]:
    """Find the experts that rows were promised, bool ``[num_experts]``."""
    num_experts = layer.num_experts
    stay = np.zeros(num_experts, dtype=bool)
    phase_of_row = np.array([level.phase for level in levels])[level_of_row]
    for phase in set(phase_of_row.tolist()):
        counts = np.bincount(topk_ids[phase_of_row == phase].ravel(), minlength=num_experts)
        in_order = np.argsort(-counts, kind="stable")
        if layer.homes is not None:
            in_order = _by_instances(in_order[counts[in_order] > 0], layer.homes)
        reached, total = np.cumsum(counts[in_order]), int(counts.sum())
        for index, level in enumerate(levels):
            if level.phase != phase:
                continue
            # The shortest beginning that has the promised share.
            num = int(np.searchsorted(reached * WHOLE, level.parts * total)) + 1
            promised = np.zeros(num_experts, dtype=bool)
            promised[in_order[: num if level.parts else 0]] = True
            wanted = np.zeros(num_experts, dtype=bool)
            wanted[topk_ids[level_of_row == index]] = True
            stay |= promised & wanted
    return stay


def _by_instances(in_order: NDArray[np.int64], homes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Order experts by their places among those of their instance, and then as they are."""
    places = np.zeros(len(in_order), np.int64)
    for home in set(homes[in_order].tolist()):
        own = homes[in_order] == home
        places[own] = np.arange(own.sum())
    return in_order[np.argsort(places, kind="stable")]


def _keep_lone(stay: NDArray[np.bool_], chosen: NDArray[np.bool_], way: int) -> None:
    """Keep an expert that alone of its group would be degraded: degrading it would save nothing."""
    going = np.flatnonzero(chosen & ~stay)
    groups, counts = np.unique(going // way, return_counts=True)
    lone = groups[counts == 1]
    stay[going[np.isin(going // way, lone)]] = True


def _keep_heaviest(
    degraded: NDArray[np.bool_],
    there: NDArray[np.bool_],
    topk_ids: NDArray[np.int32],
    topk_weights: NDArray[np.float32],
) -> None:
    """Keep each row's heaviest choice: popular experts alone are a poor stand-in for it.

    Its expert does not stay for other rows. Otherwise a lower promise would keep more experts.
    """
    for row, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        wanted = zip(-weights, ids, range(len(ids)), strict=True)
        found = [choice for choice in wanted if there[choice[1]]]
        if found:
            degraded[row, min(found)[2]] = False


def _unite(
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    degraded: NDArray[np.bool_],
    num_experts: int,
    way: int,
) -> None:
    """Give a row's degraded choices to united experts, each once, with the sum of their weights."""
    first: dict[int, int] = {}
    for choice in np.flatnonzero(degraded):
        united = num_experts + ids[choice] // way
        at = first.setdefault(int(united), int(choice))
        ids[choice] = united
        if at != choice:
            weights[at] += weights[choice]
            ids[choice], weights[choice] = NOBODY, 0


def _leave_out(
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    degraded: NDArray[np.bool_],
    *,
    same_sum: bool,
) -> None:
    """Drop a row's degraded choices; with ``same_sum`` the remaining weights are scaled to the former sum."""
    whole, kept = (_sum_in_order(part) for part in (weights, weights[~degraded]))
    ids[degraded], weights[degraded] = NOBODY, 0
    if same_sum and kept:
        weights *= np.float32(whole / kept)


def _sum_in_order(values: NDArray[np.float32]) -> float:
    return float(np.add.accumulate(values, dtype=np.float64)[-1]) if len(values) else 0.0
