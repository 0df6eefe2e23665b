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

_Place = tuple[str, int]  # a worker, and one of its lanes


class RoundWaits:
    """Learns from rounds which workers come together."""

    def __init__(self) -> None:
        self.round_s = self.step_s = 0.0  # what rounds take to their sums, and steps
        self._regulars: dict[int, set[str]] = {}  # by lane
        self._companions: dict[_Place, frozenset[str]] = {}  # members of its last round
        # First layers at which it was waited for in vain, since it met others.
        self._missed: dict[_Place, int] = {}
        self._passes: dict[_Place, int] = {}  # how often it may come before it is waited for again
        self._began_s: dict[_Place, float] = {}  # when its step did

    def regulars(self, lane: int) -> frozenset[str]:
        """Workers that are waited for at a step's first layer."""
        return frozenset(self._regulars.get(lane, ()))

    def awaited(self, worker_id: str, lane: int, first: bool) -> set[str]:
        """Workers that a round opened by this one waits for, at a step's first layer or another."""
        if first:
            return set(self._regulars.get(lane, ()))
        return set(self._companions.get((worker_id, lane), ()))

    def patience_s(self, first: bool) -> float:
        """Seconds that a round stays open for those who are missing."""
        least, most = _PATIENCE_S
        return min(most, max(least, self.step_s if first else _ROUND_SHARE * self.round_s))

    def came(self, worker_id: str, lane: int, now_s: float, *, first: bool, last: bool) -> None:
        """Note that a worker is at a layer, maybe the first or last of its step.

        A step takes until its last layer, and a round more: behind it there may be a pause.
        """
        place = worker_id, lane
        if first:
            self._began_s[place] = now_s
            self._expect(place)
        if last and place in self._began_s:
            took_s = now_s - self._began_s.pop(place) + self.round_s
            if took_s < _IDLE_S:
                self.step_s = _faded(self.step_s, took_s)

    def left(
        self, lane: int, first: bool, members: frozenset[str], missed: Collection[str]
    ) -> None:
        """Note the members that a round left with, and those waited for in vain."""
        for worker_id in members:
            self._companions[worker_id, lane] = members
        if not first:
            return
        regulars = self._regulars.setdefault(lane, set())
        regulars -= set(missed)
        for worker_id in missed:
            times = self._missed.get((worker_id, lane), 0)
            self._missed[worker_id, lane] = min(times + 1, _MOST_MISSED)
            self._passes[worker_id, lane] = (1 << times) - 1
        if len(members) > 1:
            regulars |= members
            for worker_id in members:
                self._missed.pop((worker_id, lane), None)
                self._passes.pop((worker_id, lane), None)

    def took(self, seconds: float) -> None:
        """Note what a round took to its sums."""
        self.round_s = _faded(self.round_s, seconds)

    def keep(self, workers: Collection[str]) -> None:
        """Know only these workers from now on; others may come again."""
        here = set(workers)
        self._regulars = {lane: known & here for lane, known in self._regulars.items()}
        self._companions = {
            place: known & here for place, known in self._companions.items() if place[0] in here
        }
        for known in (self._missed, self._passes, self._began_s):
            for place in [place for place in known if place[0] not in here]:
                del known[place]

    def _expect(self, place: _Place) -> None:
        worker_id, lane = place
        if self._passes.get(place, 0) > 0:
            self._passes[place] -= 1
        else:
            self._regulars.setdefault(lane, set()).add(worker_id)


def _faded(known_s: float, new_s: float) -> float:
    return _FADES * known_s + (1 - _FADES) * new_s if known_s else new_s
