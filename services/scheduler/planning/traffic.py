"""Traffic of the models, from the reports of expert workers."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog
from prometheus_client import Counter

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import InvalidInput
from moesaic.messages.activation import ActivationReport
from moesaic.messages.placement import Placement
from moesaic.placement.traffic.origins import OriginTraffic
from moesaic.placement.traffic.statistics import Statistics
from moesaic.services.scheduler.following import follow_while_leading

log = structlog.get_logger()

STREAM = "ctl:activations"
MAX_MODELS = 4  # whose traffic is remembered
MAX_EPOCHS = 16  # whose measurements are remembered
MAX_GONE = 16  # origins that may come back, and find their demand known
_MOST_TOLD = 1000  # workers whose refusal is not logged again

_reports = Counter("moesaic_activation_reports", "Reports of expert workers", ["outcome"])
_decoder: "msgspec.msgpack.Decoder[ActivationReport]" = msgspec.msgpack.Decoder(ActivationReport)


@dataclass
class ModelTraffic:
    """One model's traffic, older batches counting less."""

    statistics: Statistics
    until_s: float  # monotonic time up to which it is aged
    origins: OriginTraffic  # by the worker that tells it
    windows: int = 0
    window_s: float = 0.0  # length of the latest
    scheduling: str = "aebs"  # how workers choose replicas, as the latest report has it
    served: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Batches, and the sum of most activated experts on one worker, by epoch."""


class TrafficFeed:
    """Reads the reports while its scheduler leads.

    Attributes:
        refused: reports that made no sense.
    """

    def __init__(
        self,
        bus: Bus,
        leadership: Leadership,
        view: PlacementView,
        half_life_s: float,
        is_origin: Callable[[str], bool] = lambda worker_id: False,
    ) -> None:
        """Read with ``bus`` while ``leadership`` is held.

        Args:
            bus: bus of the cluster.
            leadership: leadership of this scheduler.
            view: view of the placement in force.
            half_life_s: age in seconds at which batches count half.
            is_origin: returns true for a worker that reports the choices of its own requests.
        """
        self._is_origin = is_origin
        self._bus, self._leadership, self._view = bus, leadership, view
        self._half_life_s = half_life_s
        self._models: OrderedDict[str, ModelTraffic] = OrderedDict()
        self._told: dict[tuple[str, int], str] = {}  # fields that were refused last, by worker
        self.refused = 0

    def of(self, model_digest: str) -> ModelTraffic | None:
        """A model's traffic as of now; None if there was none."""
        traffic = self._models.get(model_digest)
        if traffic is not None:
            self._age(traffic)
        return traffic

    def served(self, placement: Placement) -> tuple[int, int] | None:
        """Batches under a placement's epoch, and the sum of the most activated experts on one worker."""
        traffic = self._models.get(placement.model_digest)
        return traffic.served.get(placement.epoch) if traffic else None

    async def run(self) -> None:
        """Take in every report while this scheduler leads, for ever.

        A new leader begins with the reports of the last minutes, which Redis has.
        """
        await follow_while_leading(
            self._bus, self._leadership, STREAM, _decoder, self.take, begin=self._forget_all
        )

    def _forget_all(self) -> None:
        """Forget earlier reports: all that Redis has are read now."""
        self._models.clear()
        self._told.clear()

    def take(self, report: ActivationReport) -> None:
        """Take in one report; an inconsistent one is counted and changes nothing."""
        worker = report.window.worker_id[:100], report.window.generation
        try:
            self._take(report)
        except InvalidInput as error:
            self.refused += 1
            _reports.labels("refused").inc()
            # It reports all the time.
            if self._told.get(worker) != error.field:
                if len(self._told) >= _MOST_TOLD:
                    self._told.clear()
                self._told[worker] = error.field
                log.warning("activations.refused", worker_id=worker[0], cause=str(error))
        else:
            _reports.labels("taken").inc()
            self._told.pop(worker, None)

    def _take(self, report: ActivationReport) -> None:
        window, placement = report.window, self._view.current
        if placement is None or window.model_digest != placement.model_digest:
            raise InvalidInput("model_digest", "is not of the model that is placed")
        known = {worker.incarnation for worker in placement.workers}
        if (window.worker_id, window.generation) not in known:
            raise InvalidInput("worker_id", "is not placed in this generation")
        if unknown := {seen.layer for seen in window.layers} - set(placement.layers):
            raise InvalidInput("layers", f"has no layers {sorted(unknown)[:3]} with experts")
        most = sum(seen.batches for seen in window.layers)
        for served in report.served:
            if served.epoch > placement.epoch or served.batches > most:
                raise InvalidInput("served", "has another epoch or more batches than were seen")
            if not served.batches <= served.busiest <= served.batches * placement.num_experts:
                raise InvalidInput("served.busiest", "must be between 1 and E for each batch")
        traffic = self._models.get(placement.model_digest)
        if traffic is None:
            traffic = self._begun(placement)
        self._age(traffic)
        traffic.statistics = traffic.statistics.plus(window)  # or refuses it
        if self._is_origin(window.worker_id):
            traffic.origins.add(window, time.monotonic())
            self._forget_some(traffic.origins, {worker_id for worker_id, _ in known})
        traffic.window_s = window.window_s
        traffic.windows, traffic.scheduling = traffic.windows + 1, report.scheduling
        for served in report.served:
            batches, busiest = traffic.served.get(served.epoch, (0, 0))
            traffic.served[served.epoch] = batches + served.batches, busiest + served.busiest
        while len(traffic.served) > MAX_EPOCHS:
            del traffic.served[min(traffic.served)]
        self._models[placement.model_digest] = traffic
        self._models.move_to_end(placement.model_digest)
        while len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)

    def _forget_some(self, origins: OriginTraffic, placed: set[str]) -> None:
        """Forget origins that are placed no more, if many are known: ids may be made of random letters."""
        gone = origins.origins - placed
        if len(gone) > MAX_GONE:
            for origin in gone:
                origins.forget(origin)

    def _begun(self, placement: Placement) -> ModelTraffic:
        origins = OriginTraffic(placement.num_own, placement.layers, self._half_life_s)
        nothing = Statistics(placement.num_own, {})
        return ModelTraffic(statistics=nothing, until_s=time.monotonic(), origins=origins)

    def _age(self, traffic: ModelTraffic) -> None:
        now_s = time.monotonic()
        keep = 0.5 ** ((now_s - traffic.until_s) / self._half_life_s)
        traffic.statistics, traffic.until_s = traffic.statistics.decayed(keep), now_s
