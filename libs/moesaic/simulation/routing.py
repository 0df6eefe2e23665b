"""Choices of the worker that a request goes to: the form of a router, and the plainest one."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from moesaic.simulation.planning import SimulatedRequest

Routed = Sequence[tuple[SimulatedRequest, int]]  # requests, and the workers that they go to
NOBODY: Routed = ()
MOST_ENTRIES = 8  # of a worker, those of the past among them


class FleetRouter(Protocol):
    """Routes requests to workers that have joined. Each call returns the requests that go to a worker now."""

    def joined(self, worker: int, now_s: float) -> Routed:
        """Note that a worker takes requests from now on."""
        ...

    def left(self, worker: int) -> None:
        """Note that a worker takes no more; those that it has go on."""
        ...

    def submitted(self, request: SimulatedRequest, now_s: float) -> Routed:
        """Route a request, or have it wait.

        Raises:
            MoesaicError: it may not even wait.
        """
        ...

    def began(self, request: SimulatedRequest, now_s: float) -> Routed:
        """Note that a request has its first token."""
        ...

    def ended(self, request: SimulatedRequest, now_s: float) -> Routed:
        """Note that a request has ended."""
        ...

    def overdue(self, now_s: float) -> Routed:
        """Route those that have waited for too long."""
        ...

    def next_overdue_s(self) -> float | None:
        """Tell when ``overdue`` is to be called, if at all."""
        ...


class LeastOutstanding:
    """Gives a request to the worker that has the fewest; of several to the first.

    Requests wait only while there is no worker.
    """

    def __init__(self) -> None:
        self._num_open: dict[int, int] = {}  # of workers that take requests
        self._order: list[tuple[int, int]] = []  # (number, worker); entries of the past among them
        self._waiting: list[SimulatedRequest] = []

    def joined(self, worker: int, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        self._set(worker, 0)
        waiting, self._waiting = self._waiting, []
        return [each for request in waiting for each in self.submitted(request, now_s)]

    def left(self, worker: int) -> None:
        """See ``FleetRouter``."""
        del self._num_open[worker]

    def submitted(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        if not self._num_open:
            self._waiting.append(request)
            return NOBODY
        order, num_open = self._order, self._num_open
        while num_open.get(order[0][1]) != order[0][0]:
            heappop(order)
        number, worker = order[0]
        self._set(worker, number + 1)
        return ((request, worker),)

    def began(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        return NOBODY

    def ended(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        if (number := self._num_open.get(request.worker)) is not None:
            self._set(request.worker, number - 1)
        return NOBODY

    def overdue(self, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        return NOBODY

    def next_overdue_s(self) -> float | None:
        """See ``FleetRouter``."""
        return None

    def _set(self, worker: int, number: int) -> None:
        self._num_open[worker] = number
        heappush(self._order, (number, worker))
        if len(self._order) > MOST_ENTRIES * len(self._num_open) + MOST_ENTRIES:
            self._order = [(number, worker) for worker, number in self._num_open.items()]
            heapify(self._order)
