"""Which of a batch's experts one worker computes. All workers decide, alike, about all of them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.kernels import aebs
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement import replica_choices
from moesaic.placement.aebs import NONE, Costs, live_replicas, replica_table
from moesaic.placement.serving import replicas_on, serving_costs, serving_replicas

_BY_ROW = {  # rows of one expert may go to several workers
    "random-per-row": replica_choices.random_per_token,
    "token-balanced": replica_choices.token_balanced,
}
_BY_BATCH = {  # slow, in numpy: to compare with
    "metro": replica_choices.metro,
    "random": replica_choices.random_per_expert,
}


@dataclass(frozen=True)
class Share:
    """What one worker computes of a batch, and what it knows of the others."""

    slot_ids: Tensor  # int32 [T, k], its own slots; -1: another worker's choice
    served: NDArray[np.int32]  # who serves: by expert [E], or by choice [T, k]
    load: NDArray[
        np.int64
    ]  # [N] what each has to do now, with what it had before, as ``aebs`` counts
    num_experts: int  # distinct ones of its own
    most_experts: int  # of any worker


class Sharing:
    """One layer's experts among the workers that live, under one policy."""

    def __init__(
        self,
        placement: Placement,
        layer: int,
        worker_idx: int,
        scheduling: ExpertScheduling,
        live: Sequence[int],
        device: torch.device,
    ) -> None:
        """Of ``placement.workers``, ``live`` may serve; ``worker_idx`` is who asks."""
        self._layer, self._worker_idx, self._scheduling = layer, worker_idx, scheduling
        slots = placement.slots[placement.layers.index(layer)]
        num_workers = len(slots)
        lives = np.zeros(num_workers, bool)
        lives[list(live)] = True
        held = live_replicas(replica_table(slots, placement.num_experts), lives)
        first = sum(len(experts) for experts in slots[:worker_idx])
        self._window = (first, first + len(slots[worker_idx]))
        self._live = live
        self._held = serving_replicas(scheduling, held)
        self._replicas = torch.from_numpy(self._held).to(device)
        self._lives = torch.from_numpy(lives).to(device)
        costs = serving_costs(scheduling, [worker.ridge_rows for worker in placement.workers])
        self._costs = Costs(
            torch.from_numpy(costs.weights).to(device), torch.from_numpy(costs.row).to(device)
        )
        self._no_load = torch.zeros(num_workers, dtype=torch.int64, device=device)
        self._unheld = torch.from_numpy((held < 0).all(axis=1))  # [E]
        self._all_held = not bool(self._unheld.any())

    def share(self, topk_ids: Tensor, load: Sequence[int] | None, seed: bytes) -> Share:
        """Decide about one batch.

        Args:
            topk_ids: int32 ``[T, k]``, contiguous.
            load: of the live workers, in the unit of ``Share.load``; None means that they have
                nothing else to do.
            seed: the same for all who decide; what is random is drawn from it.

        Raises:
            ExpertUnavailable: nobody who lives holds an expert that some row wants.
        """
        if not self._all_held:
            wanted = set(topk_ids.flatten().tolist())
            if missing := [e for e in self._unheld.nonzero().flatten().tolist() if e in wanted]:
                raise ExpertUnavailable(self._layer, len(missing))
        if self._scheduling in _BY_ROW:
            return self._by_row(topk_ids, seed)
        replicas = self._replicas
        if self._scheduling in _BY_BATCH:
            chosen = self._chosen(topk_ids, seed)
            replicas = torch.from_numpy(chosen).to(replicas.device)
        carried = self._no_load if load is None else self._spread(load)
        schedule = aebs.schedule_experts(
            topk_ids, replicas, self._lives, carried, self._costs, self._window
        )
        instance = schedule.instance.cpu().numpy()
        counts = np.bincount(instance + 1, minlength=len(self._lives) + 1)[1:]
        return Share(
            schedule.replica_of_choice,
            instance,
            schedule.load.cpu().numpy(),
            int(counts[self._worker_idx]),
            int(counts.max()),
        )

    def _spread(self, load: Sequence[int]) -> Tensor:
        carried = self._no_load.clone()
        carried[list(self._live)] = torch.tensor(load, device=carried.device)
        return carried

    def _chosen(self, topk_ids: Tensor, seed: bytes) -> NDArray[np.int32]:
        """The replicas without those that the policy passes over."""
        ids = topk_ids.cpu().numpy()
        served = _BY_BATCH[self._scheduling](ids, self._held, _rng(seed))
        instance = np.full(len(self._held), NONE, np.int32)
        instance[ids] = served
        return replicas_on(self._held, instance)

    def _by_row(self, topk_ids: Tensor, seed: bytes) -> Share:
        ids = topk_ids.cpu().numpy()
        served = _BY_ROW[self._scheduling](ids, self._held, _rng(seed))
        slots = self._held[ids, served] - self._window[0]
        slot_ids = np.where(served == self._worker_idx, slots, np.int32(NONE))
        counts = replica_choices.activated_experts(ids, served, *self._held.shape)
        return Share(
            torch.from_numpy(slot_ids).to(topk_ids.device),
            served,
            counts,
            int(counts[self._worker_idx]),
            int(counts.max()),
        )


def decision_digest(
    epoch: int, layer: int, threshold: float, topk_ids: Tensor, served: NDArray[np.int32]
) -> int:
    """64 bits that two workers share only if they decided alike about the same rows.

    Who serves an expert does not show which rows have it, so the choices are part of it.

    Args:
        epoch: of the placement.
        layer: the decoder layer.
        threshold: share of work that is kept exact, in ``0..1``.
        topk_ids: int32 ``[T, k]``.
        served: of a ``Share``.
    """
    shape = (*topk_ids.shape, *served.shape)
    digest = xxhash.xxh3_64(
        struct.pack(f"<QqdB{len(shape)}q", epoch, layer, threshold, len(shape), *shape)
    )
    digest.update(topk_ids.cpu().contiguous().numpy().data)
    digest.update(served.data)
    return digest.intdigest()


def has_choice(placement: Placement, layer: int, live: Sequence[int]) -> bool:
    """Whether several of those who live hold the same expert of a layer."""
    held = [set(placement.slots[placement.layers.index(layer)][n]) - {EMPTY_SLOT} for n in live]
    return sum(map(len, held)) > len(set[int]().union(*held))


def serving_workers(
    placement: Placement, layer: int, scheduling: ExpertScheduling, live: Sequence[int]
) -> tuple[int, ...] | None:
    """Who may serve a batch of a layer, ascending; None if nobody who lives holds some expert."""
    slots = placement.slots[placement.layers.index(layer)]
    lives = np.zeros(len(slots), bool)
    lives[list(live)] = True
    held = live_replicas(replica_table(slots, placement.num_experts), lives)
    held = serving_replicas(scheduling, held)
    if not (held >= 0).any(axis=1).all():
        return None
    return tuple(np.flatnonzero((held >= 0).any(axis=0)).tolist())


def _rng(seed: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(seed, "little"))
