"""One worker's own steps, and the chances of its rows to go together with those of others. Pure."""

from collections import Counter, defaultdict

from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.way import MANY_ROWS

_IDLE_S = 1.0  # without a step; then there is no work
_LATELY_S = 4.0  # a neighbour with few rows still offers them more often


class Steps:
    """Steps of one attention worker. The batches of a step are told apart by their lane: 0, 1, ..."""

    def __init__(self) -> None:
        self.direct_until_s = 0.0  # until then all rows go directly: something failed
        # By lane: until then its rows do, unless this worker alone has many.
        self.few_until_s = defaultdict[int, float](float)
        self._step_id, self._lanes = b"", Counter[int]()  # batches of a step by layer, until now
        self._began_s = float("-inf")  # the last step
        self._apart: set[int] = set()  # lanes that have gone directly in this step
        # By lane, where nobody joined the rows offered last.
        self._alone_until_s: dict[int, float] = {}

    def lane(self, step_id: bytes, layer: int) -> int:
        """Number this batch among those of the step for this layer."""
        if step_id != self._step_id:
            self._step_id, self._lanes = step_id, Counter()
        self._lanes[layer] += 1
        return self._lanes[layer] - 1 if step_id else 0

    def begin(self, lane: int, rows: int, now_s: float) -> None:
        """Note that a batch is at the first layer of its step: there it can meet others again."""
        self._began_s = now_s
        self._apart.discard(lane)
        if self.directly_for_s(lane, rows, now_s):
            self._apart.add(lane)

    def go_directly(self, lane: int) -> None:
        """Send this batch directly, to the end of the step: others are elsewhere by now."""
        self._apart.add(lane)

    def directly_for_s(self, lane: int, rows: int, now_s: float) -> float:
        """Seconds in which batches of so many rows begin directly; 0: they may go in two phases."""
        until_s = self.direct_until_s
        if rows < MANY_ROWS:
            until_s = max(until_s, self.few_until_s[lane])
        return max(0.0, until_s - now_s)

    def may_meet(self, lane: int, now_s: float) -> bool:
        """Tell if this batch may go in two phases."""
        return now_s >= self.direct_until_s and lane not in self._apart

    def is_alone(self, lane: int, first: bool, now_s: float) -> bool:
        """Tell if nothing is to be offered, for nobody joined: for some time, and then to the step's end."""
        until_s = self._alone_until_s.get(lane)
        return until_s is not None and (now_s < until_s or not first)

    def is_idle(self, now_s: float) -> bool:
        """Tell if this worker has no work."""
        return now_s > self._began_s + _IDLE_S

    def heed(self, advice: JoinReply, lane: int, now_s: float) -> None:
        """Do next what the lead has said."""
        self._alone_until_s.pop(lane, None)
        if advice.next == "alone":
            self._alone_until_s[lane] = now_s + advice.for_s
        elif advice.next == "direct":
            self.few_until_s[lane] = now_s + advice.for_s


class RecentRows:
    """Rows with which workers of this node have begun steps lately, as far as this one knows."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}  # by worker and lane: rows, when

    def note(self, worker_id: str, lane: int, rows: int, now_s: float) -> None:
        """Note that a worker has begun a step with so many rows."""
        self._seen[worker_id, lane] = rows, now_s

    def rows(self, lane: int, now_s: float) -> int:
        """Count the rows of all these workers."""
        self._seen = {k: v for k, v in self._seen.items() if v[1] > now_s - _LATELY_S}
        return sum(rows for (_, at), (rows, _) in self._seen.items() if at == lane)
