"""One worker's own steps, and the chances of its rows to go together with those of others. Pure."""

from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.way import MANY_ROWS

_IDLE_S = 1.0  # without a step; then there is no work
_LATELY_S = 4.0  # a neighbour with few rows still offers them more often


class Steps:
    """Steps of one attention worker."""

    def __init__(self) -> None:
        self.direct_until_s = 0.0  # until then all rows go directly: something failed
        self.few_until_s = 0.0  # until then its rows do, unless this worker alone has many
        self._began_s = float("-inf")  # the last step
        self._is_direct = False  # this step goes directly
        self._alone_until_s: float | None = None  # nobody joined the rows offered last

    def begin(self, rows: int, now_s: float) -> None:
        """Note that rows are at the first layer of their step: there they can meet others again."""
        self._began_s = now_s
        self._is_direct = self.directly_for_s(rows, now_s) > 0

    def go_directly(self) -> None:
        """Send rows directly, to the end of the step: others are elsewhere by now."""
        self._is_direct = True

    def directly_for_s(self, rows: int, now_s: float) -> float:
        """Seconds in which steps of so many rows begin directly; 0: they may go in two phases."""
        until_s = self.direct_until_s
        if rows < MANY_ROWS:
            until_s = max(until_s, self.few_until_s)
        return max(0.0, until_s - now_s)

    def may_meet(self, now_s: float) -> bool:
        """Tell if rows of this step may go in two phases."""
        return now_s >= self.direct_until_s and not self._is_direct

    def is_alone(self, first: bool, now_s: float) -> bool:
        """Tell if nothing is to be offered, for nobody joined: for some time, and then to the step's end."""
        until_s = self._alone_until_s
        return until_s is not None and (now_s < until_s or not first)

    def is_idle(self, now_s: float) -> bool:
        """Tell if this worker has no work."""
        return now_s > self._began_s + _IDLE_S

    def heed(self, advice: JoinReply, now_s: float) -> None:
        """Do next what the lead has said."""
        self._alone_until_s = now_s + advice.for_s if advice.next == "alone" else None
        if advice.next == "direct":
            self.few_until_s = now_s + advice.for_s


class RecentRows:
    """Rows of steps that workers of this node began recently, as far as this one knows."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # by worker: rows, when

    def note(self, worker_id: str, rows: int, now_s: float) -> None:
        """Record that a worker has begun a step with this number of rows."""
        self._seen[worker_id] = rows, now_s

    def rows(self, now_s: float) -> int:
        """Count the rows of all these workers."""
        self._seen = {k: v for k, v in self._seen.items() if v[1] > now_s - _LATELY_S}
        return sum(rows for rows, _ in self._seen.values())
