"""Trials: for a short while, everybody goes the same way at the same time. Pure.

What a way takes depends on how the others go: sending everything everywhere is quick as long as
nobody else does. And on what else the machines do, which changes from second to second. So ways are
compared side by side, in slots that follow each other closely, and all attention nodes change slots
together: one expert worker conducts, by its own clock.
"""

from typing import Annotated, NamedTuple

import msgspec

from moesaic.dispatch.exchange.costs import CASES, Case

ATTEND_EVERY_S = 0.5  # how often an attention worker asks who conducts
SWEEPS = 4  # of a trial; each goes every way once
SLOT_S = (0.15, 10.0)  # the least and the most

_NOTICE_S = 3 * ATTEND_EVERY_S  # from planning a trial to its start: all have asked meanwhile
_SETTLING = 0.2  # of a slot: what others still do from the one before is no part of it
_HERE_S = 5.0  # a node that has not asked for so long is not there
_MEASURES_S = 15.0  # at most, one worker its links

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Slot(NamedTuple):
    """A part of a trial in which everybody goes one way."""

    sweep: tuple[float, int]  # which trial, and which of its sweeps
    case: Case
    ends_s: float
    settled: bool  # whether an exchange that begins now shows what the way takes


class Trial(msgspec.Struct, frozen=True):
    """Every way in turn, there and back again: what changes slowly weighs the same on each."""

    start_s: Seconds  # by the clock of whoever conducts
    slot_s: Seconds
    sweeps: int = SWEEPS

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.start_s + self.sweeps * len(CASES) * self.slot_s

    def slot(self, now_s: float) -> Slot | None:
        """The slot at a time; ``None`` before and after the trial."""
        if not self.start_s <= now_s < self.end_s:
            return None
        done = (now_s - self.start_s) / self.slot_s
        sweep, turn = divmod(min(int(done), self.sweeps * len(CASES) - 1), len(CASES))
        case = CASES[turn if sweep % 2 == 0 else -1 - turn]
        ends_s = self.start_s + (sweep * len(CASES) + turn + 1) * self.slot_s
        return Slot((self.start_s, sweep), case, ends_s, done % 1 >= _SETTLING)


class Beat(msgspec.Struct, frozen=True):
    """What the conductor says to all who ask."""

    now_s: float  # its clock
    trial: Trial | None = None  # that is planned, or under way
    may_measure: bool = True
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1  # attention nodes that have asked lately


class Conductor:
    """Plans trials, and lets one worker after the other measure its links."""

    def __init__(self) -> None:
        self._trial: Trial | None = None
        self._seen_s: dict[str, float] = {}  # by node
        self._measurer, self._measures_until_s = "", 0.0

    def beat(
        self,
        worker_id: str,
        node: str,
        now_s: float,
        *,
        slot_s: float = 0.0,
        measures: bool = False,
    ) -> Beat:
        """What there is to know for an attention worker.

        Args:
            worker_id: who asks.
            node: where it is.
            now_s: by this clock.
            slot_s: how long slots must be to show anything, if it wants a trial; else 0.
            measures: whether it wants to measure links, or is at it.
        """
        self._seen_s[node] = now_s
        self._seen_s = {n: s for n, s in self._seen_s.items() if s > now_s - _HERE_S}
        if self._trial is not None and now_s >= self._trial.end_s:
            self._trial = None
        may_measure = self._turn(worker_id, now_s, measures)
        if slot_s > 0:
            self._plan(min(max(slot_s, SLOT_S[0]), SLOT_S[1]), now_s)
        return Beat(now_s, self._trial, may_measure, len(self._seen_s))

    def _turn(self, worker_id: str, now_s: float, measures: bool) -> bool:
        taken = self._measurer != worker_id and now_s < self._measures_until_s
        if not measures:
            if not taken:
                self._measures_until_s = now_s  # it has measured
            return False
        if taken or self._trial is not None:
            return False
        self._measurer, self._measures_until_s = worker_id, now_s + _MEASURES_S
        return True

    def _plan(self, slot_s: float, now_s: float) -> None:
        trial = self._trial
        if trial is None:
            if now_s >= self._measures_until_s:
                self._trial = Trial(now_s + _NOTICE_S, slot_s)
        elif slot_s > trial.slot_s and now_s < trial.start_s - 2 * ATTEND_EVERY_S:
            self._trial = Trial(trial.start_s, slot_s)  # all will ask once more before it starts
