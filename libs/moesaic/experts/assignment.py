"""Assigns the experts of a batch to workers. Every worker decides about all of them, alike."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.kernels import aebs
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.schedule.aebs import NONE, Costs, live_replicas, replica_table
from moesaic.placement.schedule.serving import (
    Choose,
    activated_experts,
    serving_costs,
    serving_replicas,
)
from moesaic.plugins import plugins
from moesaic.transport.device_memory import begin_to_host, to_device


@dataclass(frozen=True)
class Assignment:
    """The part of a batch that one worker computes, and its knowledge of the others' parts.

    On a GPU all but ``slot_ids`` is on its way to the host, and right once the device has been waited
    for (``device_memory.settle``).
    """

    slot_ids: Tensor  # int32 [T, k], its own slots; -1: another worker's choice
    served: NDArray[np.int32]  # the worker that serves: by expert [E], or by choice [T, k]
    # [N] work of each worker now, with what it had before, in the unit of ``aebs``.
    load: NDArray[np.int64]
    worker_idx: int
    count: Callable[[], NDArray[np.int64]]  # distinct experts of each worker, [N]

    @cached_property
    def num_experts(self) -> int:
        """Distinct experts of its own."""
        return int(self._counts[self.worker_idx])

    @cached_property
    def most_experts(self) -> int:
        """Distinct experts of the worker with most of them."""
        return int(self._counts.max())

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return self.count()


class Assigner:
    """One layer's experts among the workers that live, under one policy.

    Attributes:
        lost: bool ``[num_own]``, the model's experts that only united ones can serve now; None: there are none.
        homes: int64 ``[num_own]``, the first live worker that holds each of the model's experts.
    """

    def __init__(
        self,
        placement: Placement,
        layer: int,
        worker_idx: int,
        scheduling: ExpertScheduling,
        live: Sequence[int],
        device: torch.device,
    ) -> None:
        """
        Args:
            placement: placement in which ``worker_idx`` is the worker that decides.
            layer: index of the decoder layer.
            worker_idx: see above.
            scheduling: the policy.
            live: indices of the workers that may serve.
            device: device of the batches.
        """
        self._layer, self._worker_idx = layer, worker_idx
        added = plugins("expert_schedulings").get(scheduling)
        self._choose: Choose | None = None if added is None else added.load()
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
        self.lost = lost_experts(placement, held)
        self.homes = torch.from_numpy(np.argmax(held[: placement.num_own] >= 0, axis=1))

    @property
    def native(self) -> dict[str, Any] | None:
        """Fields of ``AnswerableArgs`` that decide alike; ``None`` if Python has to decide."""
        if not self._all_held or self._choose is not None or self._replicas.is_cuda:
            return None
        return {
            "replicas": self._replicas,
            "num_experts": len(self._replicas),
            "num_workers": len(self._lives),
            "worker": self._worker_idx,
            "live": self._lives,
            "weights": self._costs.weights,
            "row": self._costs.row,
            "first": self._window[0],
            "end": self._window[1],
        }

    def assign(self, topk_ids: Tensor, load: Sequence[int] | None, seed: bytes) -> Assignment:
        """Decide about one batch.

        Args:
            topk_ids: int32 ``[T, k]``, contiguous; -1 is nobody's.
            load: load of the live workers, in the unit of ``Assignment.load``; ``None``: they have
                nothing else to do.
            seed: the same for all who decide; random choices are drawn from it.

        Raises:
            ExpertUnavailable: no live worker holds an expert that some row wants.
        """
        if not self._all_held:
            wanted = set(topk_ids.flatten().tolist())
            if missing := [e for e in self._unheld.nonzero().flatten().tolist() if e in wanted]:
                raise ExpertUnavailable(self._layer, len(missing))
        if self._choose is not None:
            return self._assign_by_row(self._choose, topk_ids, seed)
        carried = self._no_load if load is None else self._loads(load)
        schedule = aebs.schedule_experts(
            topk_ids, self._replicas, self._lives, carried, self._costs, self._window
        )
        instance = begin_to_host(schedule.instance).numpy()
        load_after = begin_to_host(schedule.load).numpy()
        num_workers = len(self._lives)

        def count() -> NDArray[np.int64]:
            return np.bincount(instance + 1, minlength=num_workers + 1)[1:]

        return Assignment(schedule.replica_of_choice, instance, load_after, self._worker_idx, count)

    def _loads(self, load: Sequence[int]) -> Tensor:
        """Loads of the live workers as int64 ``[N]``, 0 elsewhere."""
        carried = torch.zeros(len(self._lives), dtype=torch.int64)
        carried[list(self._live)] = torch.tensor(load)
        return to_device(carried, self._no_load.device)

    def _assign_by_row(self, choose: Choose, topk_ids: Tensor, seed: bytes) -> Assignment:
        ids = topk_ids.cpu().numpy()
        real = ids >= 0
        served = np.full(ids.shape, NONE, np.int32)
        rng = np.random.default_rng(int.from_bytes(seed, "little"))
        served[real] = choose(ids[real][:, None], self._held, rng)[:, 0]
        slots = self._held[ids, served] - self._window[0]
        slot_ids = np.where(served == self._worker_idx, slots, np.int32(NONE))
        counts = activated_experts(ids[real], served[real], *self._held.shape)
        slots_there = torch.from_numpy(slot_ids).to(topk_ids.device)
        return Assignment(slots_there, served, counts, self._worker_idx, lambda: counts)


def decision_digest(
    epoch: int, layer: int, threshold: float, topk_ids: Tensor, served: NDArray[np.int32]
) -> int:
    """64 bits that two workers have in common only if they decided alike about the same rows.

    The workers of experts do not show which rows have these, so the choices are part of it.

    Args:
        epoch: epoch of the placement.
        layer: the decoder layer.
        threshold: share of work that is kept exact, in ``0..1``.
        topk_ids: int32 ``[T, k]``, on the host.
        served: field ``served`` of an ``Assignment``.
    """
    shape = (*topk_ids.shape, *served.shape)
    digest = xxhash.xxh3_64(
        struct.pack(f"<QqdB{len(shape)}q", epoch, layer, threshold, len(shape), *shape)
    )
    digest.update(topk_ids.contiguous().numpy().data)
    digest.update(served.data)
    return digest.intdigest()


def lost_experts(placement: Placement, held: NDArray[np.int32]) -> Tensor | None:
    """Find the model's experts that no live worker holds, while one holds the united expert of their group.

    Args:
        placement: placement of the experts.
        held: replicas of live workers, -1 for none, ``[E, N]``.

    Returns:
        bool ``[num_own]``; None if there are none, or others cannot be stood in for.
    """
    num_own, substitution = placement.num_own, placement.substitution
    there: NDArray[np.bool_] = np.logical_or.reduce(held >= 0, axis=1)
    if there[:num_own].all() or substitution.instead != "united" or not placement.num_united:
        return None
    united = there[num_own:].repeat(substitution.way)[:num_own]
    return torch.from_numpy(~there[:num_own] & united)


def has_choice(placement: Placement, layer: int, live: Sequence[int]) -> bool:
    """True if several live workers hold the same expert of a layer."""
    held = [set(placement.slots[placement.layers.index(layer)][n]) - {EMPTY_SLOT} for n in live]
    return sum(map(len, held)) > len(set[int]().union(*held))


@dataclass(frozen=True)
class Serving:
    """The workers that may serve a batch of one layer.

    Attributes:
        workers: indices of the workers, ascending.
        has_lost: some of the model's experts are served by united ones alone.
        has_united: every united expert is there, so that choices may be degraded.
    """

    workers: tuple[int, ...]
    has_lost: bool
    has_united: bool


def serving_workers(
    placement: Placement, layer: int, scheduling: ExpertScheduling, live: Sequence[int]
) -> Serving | None:
    """Find the workers that may serve a batch of a layer.

    Returns:
        ``None`` if no live worker holds some expert, nor one that stands in for it.
    """
    slots = placement.slots[placement.layers.index(layer)]
    lives = np.zeros(len(slots), bool)
    lives[list(live)] = True
    held = live_replicas(replica_table(slots, placement.num_experts), lives)
    held = serving_replicas(scheduling, held)
    there: NDArray[np.bool_] = np.logical_or.reduce(held >= 0, axis=1)
    num_own = placement.num_own
    lost = lost_experts(placement, held)
    stood_in = np.zeros(num_own, bool) if lost is None else lost.numpy()
    if not (there[:num_own] | stood_in).all():
        return None
    workers = np.flatnonzero((held >= 0).any(axis=0)).tolist()
    return Serving(tuple(workers), bool(stood_in.any()), bool(there[num_own:].all()))
