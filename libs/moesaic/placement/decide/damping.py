"""Damping: workers that come and go, or cannot load, are left alone for a while."""

from collections.abc import Iterable

from moesaic.messages.registry import WorkerRecord

FIRST_S, LONGEST_S = 5.0, 60.0
FORGIVEN_AFTER_S = 300.0  # a worker that stayed, or stayed away, for so long starts anew


class Damping:
    """Counts how often each worker came back or failed, and holds it back twice as long every time.

    The first time costs nothing: processes are restarted, files are busy. Times are seconds of any
    monotonic clock.
    """

    def __init__(self) -> None:
        self._generation: dict[str, int] = {}
        self._troubles: dict[str, int] = {}
        self._since_s: dict[str, float] = {}  # when it came, or when its latest trouble was
        self._seen_s: dict[str, float] = {}

    def note(self, records: Iterable[WorkerRecord], now_s: float) -> None:
        """Record the workers that exist."""
        for record in records:
            worker_id, known = record.worker_id, self._generation.get(record.worker_id)
            self._seen_s[worker_id] = now_s
            if known == record.generation:
                if now_s - self._since_s[worker_id] > FORGIVEN_AFTER_S:
                    self._troubles[worker_id] = 0
                continue
            self._generation[worker_id] = record.generation
            self._since_s[worker_id] = now_s
            if known is not None:
                self._troubles[worker_id] = self._troubles.get(worker_id, 0) + 1
        for worker_id, seen_s in list(self._seen_s.items()):
            # Ids may be made of random letters.
            if now_s - seen_s > FORGIVEN_AFTER_S:
                for known_of in (self._generation, self._troubles, self._since_s, self._seen_s):
                    known_of.pop(worker_id, None)

    def note_failure(self, worker_id: str, now_s: float) -> None:
        """Count against a worker that it could not load its experts."""
        if worker_id in self._generation:
            self._troubles[worker_id] = self._troubles.get(worker_id, 0) + 1
            self._since_s[worker_id] = now_s

    def held_back_s(self, worker_id: str, now_s: float) -> float:
        """Seconds for which this worker should not be placed yet; 0 if it may be."""
        extra = self._troubles.get(worker_id, 0) - 1
        if extra < 1:
            return 0.0
        patience_s = min(FIRST_S * 2.0 ** (extra - 1), LONGEST_S)
        return max(0.0, self._since_s[worker_id] + patience_s - now_s)
