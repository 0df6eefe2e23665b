"""Workers that come and go: how long to leave one alone that has just come back."""

from collections.abc import Iterable

from moesaic.messages.registry import WorkerRecord

FIRST_S, LONGEST_S = 5.0, 60.0
FORGIVEN_AFTER_S = 300.0  # a worker that stayed so long starts anew


class Damping:
    """Counts how often each worker came back, and holds it back twice as long every time.

    The first return costs nothing: processes are restarted. Times are seconds of any one clock that
    never goes back.
    """

    def __init__(self) -> None:
        self._generation: dict[str, int] = {}
        self._returns: dict[str, int] = {}
        self._came_s: dict[str, float] = {}

    def note(self, records: Iterable[WorkerRecord], now_s: float) -> None:
        """Look at who is there."""
        for record in records:
            known = self._generation.get(record.worker_id)
            if known == record.generation:
                if now_s - self._came_s[record.worker_id] > FORGIVEN_AFTER_S:
                    self._returns[record.worker_id] = 0
                continue
            self._generation[record.worker_id] = record.generation
            self._came_s[record.worker_id] = now_s
            if known is not None:
                self._returns[record.worker_id] = self._returns.get(record.worker_id, 0) + 1

    def held_back_s(self, worker_id: str, now_s: float) -> float:
        """How much longer this worker should not be placed; 0 if it may be."""
        extra = self._returns.get(worker_id, 0) - 1
        if extra < 1:
            return 0.0
        patience_s = min(FIRST_S * 2.0 ** (extra - 1), LONGEST_S)
        return max(0.0, self._came_s[worker_id] + patience_s - now_s)
