"""Experts that were loaded for placements that came to nothing, for the next preparation."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.slots import ExpertKey, SlotTable, held_experts

KEEP_S = 120.0  # with no preparation; schedulers try again after 30 s at most


class KeptExperts:
    """Holds whole experts that no epoch has. Any thread may call.

    A preparation that was given up, or whose time was over, costs the next one only the rest.
    """

    def __init__(
        self, came: Callable[[LoadedExpert], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Tell ``came`` each expert that was loaded, so that its memory is counted."""
        self._came, self._clock = came, clock
        self._lock = threading.Lock()
        self._experts: dict[ExpertKey, LoadedExpert] = {}
        self._preparing, self._left_s = 0, clock()

    def __len__(self) -> int:
        return len(self._experts)

    def __contains__(self, key: object) -> bool:
        return key in self._experts

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Keep everything for the length of the block."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1
                self._left_s = self._clock()

    def put(self, key: ExpertKey, expert: LoadedExpert) -> None:
        """Hold an expert that was loaded."""
        self._came(expert)
        with self._lock:
            self._experts[key] = expert

    def take_over(self, before: Sequence[SlotTable], after: Sequence[SlotTable]) -> None:
        """Hold what some table had ``before`` and none has ``after``."""
        gone, still = held_experts(before), held_experts(after)
        with self._lock:
            self._experts |= {key: gone[key] for key in gone.keys() - still.keys()}
            self._left_s = self._clock()

    def keep_only(self, wanted: Collection[ExpertKey]) -> None:
        """Let go of all others."""
        with self._lock:
            self._experts = {key: self._experts[key] for key in wanted if key in self._experts}

    def take(self) -> dict[ExpertKey, LoadedExpert]:
        """Give away everything."""
        with self._lock:
            taken, self._experts = self._experts, {}
            return taken

    def expire(self) -> None:
        """Let go of everything if there was no preparation for ``KEEP_S``."""
        with self._lock:
            if not self._preparing and self._clock() - self._left_s > KEEP_S:
                self._experts = {}
