"""Restarts of a service that exits: their delays, and the end of trying; pure."""

from dataclasses import dataclass

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0  # a run this long makes the next delay short again
EARLY_S = 30.0  # an earlier exit is a failed start; a busy machine takes long to fail
STARTS_TO_FAIL = 3
STATUS_LASTING = (
    2  # a setting or a file is wrong: no restart can help, unless they have worked before
)


@dataclass(frozen=True)
class Again:
    """Start the service again after ``delay_s``."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """The service cannot run; ``reason`` is for people."""

    reason: str


class RestartPolicy:
    """The restarts of one service.

    Delays double from 1 s to 30 s, and begin anew after a run of a minute. A service that fails within
    30 s of each of its first three starts is given up; one that has run longer is always restarted.
    One whose settings or files are wrong is given up at once, unless it has run as long in a suite that worked.
    """

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S
        self._failed_starts = 0
        self._has_run = False

    def exited(self, status: int, ran_s: float, *, worked: bool = False) -> Again | GiveUp:
        """Decide after an exit with ``status`` (negative: a signal), ``ran_s`` after the start.

        ``worked`` says that the suite has been ready. Edge agents are ready before they have loaded all experts,
        so only a run of some time shows that settings and files are sound.
        """
        self._has_run = self._has_run or ran_s >= EARLY_S
        if status == STATUS_LASTING and not (worked and self._has_run):
            return GiveUp("no restart can help")
        # One that was killed did not fail by itself.
        if not self._has_run and status > 0:
            self._failed_starts += 1
            if self._failed_starts >= STARTS_TO_FAIL:
                return GiveUp(f"it failed to start {self._failed_starts} times")
        if ran_s >= HEALTHY_AFTER_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return Again(delay_s)
