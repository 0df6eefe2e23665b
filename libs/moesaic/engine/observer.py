"""Observers of an engine's steps: they measure, and change nothing of a step that runs."""

from collections.abc import Iterable

from moesaic.engine.computing import Computed
from moesaic.engine.sequences.requests import Event, Request, RequestKey
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice


class Observer:
    """Hooks of one engine, all called on its event loop. Each does nothing unless a subclass has its own."""

    def came(self, request: Request) -> None:
        """Take note of a request that has joined the queue, or was refused for want of room."""

    def forget(self, key: RequestKey) -> None:
        """Forget a request that was cancelled; unknown ones are ignored."""

    def began(self, planned: PlannedStep | Slice) -> None:
        """Take note of a step that is about to be computed."""

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        """Take note of a step that has succeeded; its events are told next."""

    def failed(self, planned: PlannedStep | Slice, error: Exception) -> None:
        """Take note of a step that has failed: it runs again if ``error`` is a ``MoesaicError``."""

    def told(self, events: Iterable[Event]) -> None:
        """Take note of events: of a step, or of requests that failed."""

    def paused(self) -> None:
        """Take note that no step can run now: there is no request, or experts are out of reach."""

    def resumed(self) -> None:
        """Take note that steps may run again."""
