"""Times at which the traffic is planned for anew, and at which a plan to stay is worth logging."""

import time

from moesaic.services.scheduler.planning.planner import PlacementPlan

MAX_BACKOFF = 5  # doublings of the interval after plans that could not be carried out
AGAIN_S = 5.0  # after a plan that was interrupted
STAYED_EVERY_S = 3600.0  # plans to stay are logged so often, while nothing else is decided


class PlanTimer:
    """Makes a plan due every ``interval_s``, and less often after plans that failed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = time.monotonic() + interval_s
        self._failures = 0  # of plans by traffic, one after the other
        self._stayed: tuple[int, str] = (0, "")  # epoch and policy of the last plan to stay
        self._stayed_s = float("-inf")

    @property
    def due(self) -> bool:
        """True if the interval is over."""
        return time.monotonic() >= self._next_s

    def begin(self) -> None:
        """Begin the next interval: a plan is being made."""
        self._next_s = time.monotonic() + self._interval_s

    def interrupted(self) -> None:
        """Make another plan due soon: one was given up for something that goes first."""
        self._next_s = min(self._next_s, time.monotonic() + min(self._interval_s, AGAIN_S))

    def ended(self, *, failed: bool) -> None:
        """Begin an interval after a plan was carried out, or failed.

        Each failure after another doubles the interval, at most ``MAX_BACKOFF`` times.
        """
        self._failures = min(self._failures + 1, MAX_BACKOFF) if failed else 0
        self._next_s = time.monotonic() + self._interval_s * 2**self._failures

    def is_news(self, plan: PlacementPlan, policy: str) -> bool:
        """True if a plan to stay belongs into the log.

        It does once for each epoch and policy, then every ``STAYED_EVERY_S``; never without traffic.
        """
        now_s, stayed = time.monotonic(), (plan.base_epoch, policy)
        if not plan.batches or (stayed == self._stayed and now_s - self._stayed_s < STAYED_EVERY_S):
            return False
        self._stayed, self._stayed_s = stayed, now_s
        return True
