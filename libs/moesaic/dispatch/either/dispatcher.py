"""Routes or gathers, step by step: the way that was measured to be faster for the step's rows.

An impossible way is not chosen: while expert workers are lost, experts come here instead.
"""

import time
from dataclasses import dataclass, replace

import structlog
from prometheus_client import Counter
from torch import Tensor

from moesaic.costs import CostBook
from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.either.cost_line import WAYS, Way, WayChoice, WayChooser
from moesaic.dispatch.expert_waits import WaitsForExperts, WaitTally
from moesaic.errors import NotReady
from moesaic.kernels.promised import PromisedRows

log = structlog.get_logger()

STEPS = Counter("moesaic_dispatch_ways", "Steps by how rows and experts met", ["way", "why"])
PREDICTED = Counter(
    "moesaic_dispatch_predicted_seconds", "What dispatching these steps should have taken", ["way"]
)
TAKEN = Counter("moesaic_dispatch_taken_seconds", "What it took", ["way"])


@dataclass
class _Journey:
    """One step's way, and its time so far."""

    steps: dict[Way, Step]  # of the ways that could begin
    choice: WayChoice | None = None
    rows: int = 0
    taken_s: float = 0.0
    num_layers: int = 0


class ChoosingDispatcher:
    """Two dispatchers with the same experts, and the choice between them."""

    def __init__(self, route: Dispatcher, gather: Dispatcher, num_layers: int) -> None:
        """``num_layers`` have experts: of a whole step."""
        self._ways: dict[Way, Dispatcher] = {"route": route, "gather": gather}
        self._num_layers = num_layers
        self._chooser = WayChooser()

    @property
    def costs(self) -> CostBook:
        """Costs of both ways, as they were measured here."""
        return self._chooser.costs

    @property
    def waits(self) -> WaitTally:
        """See ``WaitsForExperts``: those of steps that are routed."""
        route = self._ways["route"]
        return route.waits if isinstance(route, WaitsForExperts) else WaitTally()

    @property
    def waiting_for(self) -> list[str]:
        """Reasons why both ways are impossible; one possible way is enough."""
        waiting = [self._ways[way].waiting_for for way in WAYS]
        return [why for each in waiting for why in each] if all(waiting) else []

    def begin_step(self) -> Step:
        """See ``Dispatcher.begin_step``; ``dispatch`` chooses the way, for it knows the rows."""
        steps: dict[Way, Step] = {}
        refused: NotReady | None = None
        for way in WAYS:
            try:
                steps[way] = self._ways[way].begin_step()
            except NotReady as error:
                refused = error
        if "gather" in steps and steps.get("route") is not None and steps["route"].has_lost:
            self._ways["route"].end_step(steps.pop("route"))
        if not steps:
            assert refused is not None
            raise refused
        epoch = max(step.epoch for step in steps.values())
        first = next(iter(steps.values()))
        # Which way it goes is not known yet, so it may be degraded only in a way that both have.
        alike = all(step.rung == first.rung for step in steps.values())
        return replace(
            first, epoch=epoch, route=_Journey(steps), rung=first.rung if alike else None
        )

    def end_step(self, step: Step) -> None:
        """See ``Dispatcher.end_step``; learns from a step that came to its end."""
        journey: _Journey = step.route
        for way, began in journey.steps.items():
            self._ways[way].end_step(began)
        choice = journey.choice
        if choice is not None and journey.num_layers == self._num_layers:
            self._chooser.learn(choice.way, journey.rows, journey.taken_s)
            STEPS.labels(choice.way, "exploring" if choice.exploring else "faster").inc()
            if choice.way in choice.predicted_s:
                PREDICTED.labels(choice.way).inc(choice.predicted_s[choice.way])
                TAKEN.labels(choice.way).inc(journey.taken_s)

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        """See ``Dispatcher.dispatch``."""
        journey: _Journey = step.route
        if journey.choice is None:
            journey.rows = len(hidden_states)
            journey.choice = self._choose(journey)
        way = journey.choice.way
        started = time.perf_counter()
        combined = await self._ways[way].dispatch(
            journey.steps[way], layer, hidden_states, promised
        )
        journey.taken_s += time.perf_counter() - started
        journey.num_layers += 1
        return combined

    async def reachable(self) -> None:
        """Returns as soon as experts can come here: at once, as a rule."""
        await self._ways["gather"].reachable()

    def _choose(self, journey: _Journey) -> WayChoice:
        choice = self._chooser.choose(journey.rows, tuple(journey.steps))
        report = log.info if choice.exploring else log.debug
        report(
            "way.chosen",
            way=choice.way,
            rows=journey.rows,
            exploring=choice.exploring,
            predicted_ms={way: round(1e3 * s, 2) for way, s in choice.predicted_s.items()},
        )
        return choice
