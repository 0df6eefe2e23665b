"""RouteTally: exchanges of a ``RoutedDispatcher``, with their messages and bytes."""

import time

from moesaic.dispatch.expert_waits import ExpertWaits, WaitTally
from moesaic.dispatch.route import Route


class RouteTally(WaitTally):
    """Adds up the exchanges of one side."""

    def __init__(self, node: str) -> None:
        """``node``: that this side is on."""
        super().__init__()
        self._node = node
        self._route: Route | None = None
        # Of that route: layers, messages, and if some go to another node.
        self._whole = (0, 0, False)

    def count(
        self, route: Route, layer: int, nbytes: int, started: float, slowest_s: float = 0.0
    ) -> None:
        """Count one exchange that ends now.

        Args:
            route: route of its rows.
            layer: layer of the rows.
            nbytes: bytes of the rows; the returned sums have as many.
            started: start, by ``time.perf_counter``.
            slowest_s: seconds that the slowest worker computed; 0 if workers do not tell.
        """
        seconds = time.perf_counter() - started
        beyond_s = max(0.0, seconds - slowest_s) if slowest_s else 0.0
        asked, workers = route.targets[layer], route.placement.workers
        self.add(
            ExpertWaits(
                num=1,
                seconds=seconds,
                beyond_s=beyond_s,
                messages=2 * len(asked),
                nbytes=2 * len(asked) * nbytes,
                is_inter=any(workers[idx].node != self._node for idx in asked),
            )
        )

    def count_all(self, route: Route, nbytes: int, seconds: float, beyond_s: float) -> None:
        """Count one exchange of each layer of a route, which took so long together."""
        if route is not self._route:
            asked = list(route.targets.values())
            workers, num_asked = route.placement.workers, sum(map(len, asked))
            is_inter = any(workers[i].node != self._node for layer in asked for i in layer)
            self._route, self._whole = route, (len(asked), 2 * num_asked, is_inter)
        num, messages, is_inter = self._whole
        self.add(ExpertWaits(num, seconds, beyond_s, messages, messages * nbytes, is_inter))
