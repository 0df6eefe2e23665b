"""The gateway's own prefix router in a simulated fleet: it holds requests back while workers are saturated."""

from moesaic.prefix.router import PrefixRouter
from moesaic.prefix.shadows import Job
from moesaic.simulation.planning import SimulatedRequest
from moesaic.simulation.routing import NOBODY, Routed


class PrefixRouting:
    """Routes requests as a gateway does, with two differences.

    Prompts do not begin alike, so no worker has more of one than another. The router hears of a prompt's progress once
    it is computed, not after each of its steps.
    """

    def __init__(self, router: PrefixRouter, saturation: int, expected_answer_tokens: int) -> None:
        """Route by ``router``, which has no workers yet.

        Args:
            router: this fleet's own.
            saturation: FLOPs of ready work that fill a worker.
            expected_answer_tokens: of each request, before it is answered.
        """
        self._router, self._saturation = router, saturation
        self._expected_tokens = expected_answer_tokens
        self._waiting: dict[int, SimulatedRequest] = {}  # by number

    def joined(self, worker: int, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        self._router.fleet.join(worker, self._saturation)
        self._router.fleet.accept(worker, True)
        return self.overdue(now_s)

    def left(self, worker: int) -> None:
        """See ``FleetRouter``."""
        self._router.fleet.accept(worker, False)

    def submitted(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``.

        Raises:
            Overloaded: as many wait as the router allows.
        """
        prompt_tokens = max(1, request.prompt_tokens - request.cached_tokens)
        job = Job(request.number, prompt_tokens, answer_tokens=self._expected_tokens)
        self._router.submit(job, now_s)
        self._waiting[request.number] = request
        return self.overdue(now_s)

    def began(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        self._router.fleet.progressed(request.number, request.prompt_tokens, 1)
        return self.overdue(now_s)

    def ended(self, request: SimulatedRequest, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        self._router.withdraw(request.number)
        return self.overdue(now_s)

    def overdue(self, now_s: float) -> Routed:
        """See ``FleetRouter``."""
        if not self._waiting:
            return NOBODY
        decisions = self._router.route(now_s)
        return [(self._waiting.pop(made.job.job_id), made.worker) for made in decisions]

    def next_overdue_s(self) -> float | None:
        """See ``FleetRouter``."""
        return self._router.next_overdue_s()
