"""Workers that a round waits for, and for how long. Pure.

================= ================================== ================================================
layer of a step   waited for                         at most
================= ================================== ================================================
first             regulars: they began a step lately what a step takes: one in the middle of a step
                                                     will come
any other         the opener's companions in its     half of what a round takes
                  last round
================= ================================== ================================================

A worker that stays away is waited for no more until it comes again. One that is missed again and
again, for it keeps another pace, comes twice, four times, up to 64 times before it is waited for once
more. Workers that begin a step together stay together, for their sums arrive at the same time.
"""

from collections.abc import Collection

_ROUND_SHARE = 0.5  # of what a round takes: so long may a companion be behind
_PATIENCE_S = (0.0005, 2.0)  # the least and the most
_IDLE_S = 4.0  # no step takes so long
_FADES = 0.8  # what a round's time weighs after the next one
_MOST_MISSED = 6  # powers of two


class RoundWaits:
    """Learns from rounds which workers come together.

    Attributes:
        regulars: workers that are waited for at a step's first layer.
        round_s: seconds that rounds take to their sums.
        step_s: seconds that steps take.
    """

    def __init__(self) -> None:
        self.round_s = self.step_s = 0.0
        self.regulars: set[str] = set()
        # By worker: members of its last round; first layers at which it was waited for in vain, since it met others;
        # how often it may come before it is waited for again; when its step began.
        self._companions: dict[str, frozenset[str]] = {}
        self._missed: dict[str, int] = {}
        self._passes: dict[str, int] = {}
        self._began_s: dict[str, float] = {}

    def awaited(self, worker_id: str, first: bool) -> set[str]:
        """Workers that a round opened by this one waits for, at a step's first layer or another."""
        return set(self.regulars if first else self._companions.get(worker_id, ()))

    def patience_s(self, first: bool) -> float:
        """Seconds that a round stays open for those who are missing."""
        least, most = _PATIENCE_S
        return min(most, max(least, self.step_s if first else _ROUND_SHARE * self.round_s))

    def came(self, worker_id: str, now_s: float, *, first: bool, last: bool) -> None:
        """Note that a worker is at a layer, maybe the first or last of its step.

        A step takes until its last layer, and a round more: behind it there may be a pause.
        """
        if first:
            self._began_s[worker_id] = now_s
            self._expect(worker_id)
        if last and worker_id in self._began_s:
            took_s = now_s - self._began_s.pop(worker_id) + self.round_s
            if took_s < _IDLE_S:
                self.step_s = _faded(self.step_s, took_s)

    def left(self, first: bool, members: frozenset[str], missed: Collection[str]) -> None:
        """Note the members that a round left with, and those waited for in vain."""
        for worker_id in members:
            self._companions[worker_id] = members
        if not first:
            return
        self.regulars -= set(missed)
        for worker_id in missed:
            times = self._missed.get(worker_id, 0)
            self._missed[worker_id] = min(times + 1, _MOST_MISSED)
            self._passes[worker_id] = (1 << times) - 1
        if len(members) > 1:
            self.regulars |= members
            for worker_id in members:
                self._missed.pop(worker_id, None)
                self._passes.pop(worker_id, None)

    def took(self, seconds: float) -> None:
        """Note what a round took to its sums."""
        self.round_s = _faded(self.round_s, seconds)

    def keep(self, workers: Collection[str]) -> None:
        """Know only these workers from now on; others may come again."""
        here = set(workers)
        self.regulars &= here
        self._companions = {
            worker_id: known & here
            for worker_id, known in self._companions.items()
            if worker_id in here
        }
        for known in (self._missed, self._passes, self._began_s):
            for worker_id in known.keys() - here:
                del known[worker_id]

    def _expect(self, worker_id: str) -> None:
        if self._passes.get(worker_id, 0) > 0:
            self._passes[worker_id] -= 1
        else:
            self.regulars.add(worker_id)


def _faded(known_s: float, new_s: float) -> float:
    return _FADES * known_s + (1 - _FADES) * new_s if known_s else new_s
