"""Epochs that one expert worker answers for: prepared, in force, or recently superseded.

| event | then answered for |
|---|---|
| ``add`` | one more epoch, prepared |
| ``drop_uncommitted`` | no epoch before, unless it was committed or a step asks for it |
| ``commit`` | the epoch, the last ones before it, and later ones only if a step asks for them |
| ``learn`` | the epoch, the last ones before it, and all later ones; without slots if others alone have it |
| ``abort`` | the epoch no more, unless it is in force |
| ``retire`` | no epoch that was superseded long ago, unless steps recently asked for it |

An epoch that a step asks for was committed, even if this worker was not told yet.
"""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from moesaic.errors import NotReady, StaleEpoch
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.messages.placement import Placement

MAX_PAST_TENURES = 3  # each may hold a copy of what changed since
# Frames of earlier epochs are answered this long after a commit: longer than any step takes.
RETIRE_AFTER_S = 10.0
# And this long if steps still ask for an earlier one: their workers do not hear of its successor.
MAX_RETIRE_AFTER_S = 120.0


@dataclass(frozen=True)
class Tenure:
    """One epoch on this worker: its placement and its slots."""

    placement: Placement
    worker_idx: int  # of this worker in the placement; -1: it is not part of it
    table: SlotTable
    committed_s: float | None = None  # monotonic time of the commit, None while only prepared

    @classmethod
    def of_others(cls, placement: Placement) -> "Tenure":
        """A tenure of a placement that this worker is not part of."""
        empty = LayerSlots.of((), ())
        return cls(placement, -1, SlotTable(dict.fromkeys(placement.layers, empty)))


class Epochs:
    """Tenures by epoch. Any thread may call; each sees tables only whole."""

    def __init__(self, worker_id: str, retire_after_s: float | None = None) -> None:
        """Begin without any placement; the epoch in force is 0.

        Epochs that another has followed are freed after ``retire_after_s``; None: ``RETIRE_AFTER_S``.
        """
        self._worker_id, self._retire_after_s = worker_id, retire_after_s
        self._tenures: dict[int, Tenure] = {}  # replaced, never changed
        self._asked_s: dict[int, float] = {}  # when a step last asked for an epoch
        # By id: experts of any epoch, also of one that is answered no more while a step computes with it.
        self._alive: weakref.WeakValueDictionary[int, GatedMLP] = weakref.WeakValueDictionary()
        self._changing = threading.Lock()  # loading and commits have threads of their own
        self.in_force = 0
        # Steps are also answered without Python: when they asked for an epoch, and who must hear
        # of epochs that are answered no more.
        self.asked_elsewhere_s: Callable[[int], float] = _never
        self.on_change: Callable[[set[int]], None] = _ignore

    def ask(self, epoch: int) -> Tenure:
        """The tenure that a step needs; the request is noted.

        Raises:
            StaleEpoch: the epoch is not answered.
        """
        tenure = self._tenures.get(epoch)
        if tenure is None:
            raise StaleEpoch(epoch, self.in_force)
        self._asked_s[epoch] = time.monotonic()
        return tenure

    def find(self, placement: Placement) -> Tenure | None:
        """The tenure of exactly this placement; ``None`` if it is still to be prepared.

        Raises:
            StaleEpoch: a later epoch, or another placement of this one, is in force already.
        """
        known = self._tenures.get(placement.epoch)
        found = known if known is not None and known.placement == placement else None
        overtaken = placement.epoch < self.in_force
        if overtaken or (placement.epoch == self.in_force and found is None):
            raise StaleEpoch(placement.epoch, self.in_force)
        return found

    def answers(self, epoch: int) -> bool:
        """True if the epoch is answered."""
        return epoch in self._tenures

    @property
    def tables(self) -> list[SlotTable]:
        """The slots of all epochs, newest first."""
        return [tenure.table for _, tenure in sorted(self._tenures.items(), reverse=True)]

    def add(self, tenure: Tenure) -> None:
        """Answer for a prepared epoch from now on."""
        with self._changing:
            self._put(tenure)
        for slots in tenure.table.layers.values():
            for mlp in slots.mlps:
                self.note_alive(mlp)

    def note_alive(self, mlp: GatedMLP | None) -> None:
        """Count the bytes of an expert as resident for as long as anybody has it."""
        if mlp is not None:
            self._alive[id(mlp)] = mlp

    def drop_uncommitted(self, before: int) -> None:
        """Free earlier epochs that nobody will commit: a scheduler commits only its latest one."""
        with self._changing:
            self._set(
                {
                    e: t
                    for e, t in self._tenures.items()
                    if e >= before or t.committed_s is not None or self._was_asked_s(e)
                }
            )

    def commit(self, epoch: int) -> None:
        """Put a prepared epoch in force; repeating it changes nothing.

        Later epochs are freed: the scheduler that leads has committed none of them.

        Raises:
            NotReady: the epoch was not prepared here.
            StaleEpoch: a later one is in force.
        """
        with self._changing:
            if epoch < self.in_force:
                raise StaleEpoch(epoch, self.in_force)
            if epoch not in self._tenures:
                raise NotReady(f"epoch {epoch} was not prepared on {self._worker_id}")
            self._put_in_force(epoch)
            # A later one that steps ask for was committed, but this worker not told.
            self._set(
                {e: t for e, t in self._tenures.items() if e <= epoch or self._was_asked_s(e)}
            )

    def learn(self, serving: Placement) -> bool:
        """Put a placement in force that was committed elsewhere, if it was prepared here or names only others.

        Steps may ask for it before this worker is told to commit it. Later epochs stay: the sender
        may no longer lead. A worker that was away until others took its place still has its old
        experts. Once it learns that, its memory is free for new ones.

        Returns:
            True if it was not in force before.
        """
        with self._changing:
            if serving.epoch <= self.in_force:
                return False
            if self._worker_id not in {worker.worker_id for worker in serving.workers}:
                self._put(Tenure.of_others(serving))
            prepared = self._tenures.get(serving.epoch)
            if prepared is None or prepared.placement != serving:
                return False
            self._put_in_force(serving.epoch)
            return True

    def abort(self, epoch: int) -> None:
        """Forget an epoch that will not be committed; one in force or unknown changes nothing."""
        with self._changing:
            if epoch > self.in_force:
                self._set({e: t for e, t in self._tenures.items() if e != epoch})

    def retire(self) -> None:
        """Free epochs that another has followed so long ago that no step can still ask for them.

        A worker without Redis does not learn of the successor and continues to ask. So an epoch stays
        that was recently asked for, until ``MAX_RETIRE_AFTER_S`` after the commit of its successor.
        """
        now_s = time.monotonic()
        after_s = RETIRE_AFTER_S if self._retire_after_s is None else self._retire_after_s
        long_ago_s, very_long_ago_s = now_s - after_s, now_s - MAX_RETIRE_AFTER_S
        with self._changing:
            oldest = max(
                (
                    epoch
                    for epoch, tenure in self._tenures.items()
                    if tenure.committed_s is not None and tenure.committed_s < long_ago_s
                ),
                default=0,
            )
            in_force = self._tenures.get(self.in_force)
            patient = in_force is not None and (in_force.committed_s or now_s) > very_long_ago_s
            self._asked_s = {e: s for e, s in self._asked_s.copy().items() if e in self._tenures}
            self._set(
                {
                    e: t
                    for e, t in self._tenures.items()
                    if e >= oldest or (patient and self._was_asked_s(e) > long_ago_s)
                }
            )

    def placement(self, epoch: int) -> Placement | None:
        """The placement of an epoch that is answered."""
        tenure = self._tenures.get(epoch)
        return tenure.placement if tenure else None

    def slots(self) -> dict[int, tuple[int, ...]]:
        """The expert in every slot of the epoch in force, by layer."""
        current = self._tenures.get(self.in_force)
        return {layer: s.experts for layer, s in current.table.layers.items()} if current else {}

    def held(self, layer: int, expert: int) -> LoadedExpert | None:
        """An expert that is in memory, for any epoch."""
        for tenure in self._tenures.values():
            slots = tenure.table.layers.get(layer)
            if slots is not None and expert in slots.experts:
                return slots.loaded[slots.experts.index(expert)]
        return None

    @property
    def resident_bytes(self) -> int:
        """Bytes of distinct expert weights in memory, over all epochs and uses."""
        # Without the lock, which whoever answers may hold for a whole batch. Some may go meanwhile.
        alive = [found() for found in self._alive.valuerefs()]
        return sum(mlp.nbytes for mlp in alive if mlp is not None)

    def _put(self, tenure: Tenure) -> None:
        """Have a tenure of its epoch, in place of any other."""
        epoch = tenure.placement.epoch
        others = {e: t for e, t in self._tenures.items() if e != epoch}
        if len(others) < len(self._tenures):
            # Whoever answers for its old placement has to hear of this.
            self._set(others)
        self._tenures = {**others, epoch: tenure}

    def _put_in_force(self, epoch: int) -> None:
        """Switch. The last epochs before stay: placements can follow close on one another."""
        if epoch > self.in_force:
            committed = replace(self._tenures[epoch], committed_s=time.monotonic())
            others = {e: t for e, t in self._tenures.items() if e != epoch}
            past = sorted(e for e in others if e < epoch)[-MAX_PAST_TENURES:]
            kept = {e: t for e, t in others.items() if e in past or e > epoch}
            self._set({**kept, epoch: committed})
            self.in_force = epoch

    def _set(self, tenures: dict[int, Tenure]) -> None:
        """Answer for these from now on, and for no other when this returns."""
        self._tenures = tenures
        self.on_change(set(tenures))

    def _was_asked_s(self, epoch: int) -> float:
        return max(self._asked_s.get(epoch, 0.0), self.asked_elsewhere_s(epoch))


def _never(epoch: int) -> float:
    return 0.0


def _ignore(epochs: set[int]) -> None:
    """Nobody has to hear of it."""
