"""An engine tells its observers of each step, in the order in which things happen."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moesaic.engine.computing import Computed
from moesaic.engine.observer import Observer
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    ScoringTask,
    TokenEvent,
)
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from tests.engine.rig import LIMITS, NUM_LAYERS, Rig, rig


class Notes(Observer):
    """Notes its calls. What it hears while the engine rests for want of requests is left out."""

    def __init__(self, r: Rig) -> None:
        self.notes: list[str] = []
        r.engine.observers.append(self)

    def came(self, request: Request) -> None:
        self.notes.append("came")

    def forget(self, key: RequestKey) -> None:
        self.notes.append("forget")

    def began(self, planned: PlannedStep | Slice) -> None:
        self.notes.append(f"began {planned.num_rows}")

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        assert 0 < computed.took_s <= took_s
        self.notes.append("ended")

    def failed(self, planned: PlannedStep | Slice, error: Exception) -> None:
        self.notes.append(f"failed {type(error).__name__}")

    def told(self, events: Iterable[Event]) -> None:
        kinds = [
            type(e).__name__
            for e in events
            if isinstance(e, TokenEvent | FinishEvent | FailureEvent)
        ]
        if kinds:
            self.notes.append(" ".join(kinds))

    def paused(self) -> None:
        self.notes.append("paused")

    def resumed(self) -> None:
        self.notes.append("resumed")


async def test_a_step_that_is_run_again_fails_pauses_and_begins_again(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        notes = Notes(r).notes
        r.dispatcher.failures = 1
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2))
        await r.ended("a")

        assert notes[: notes.index("TokenEvent FinishEvent") + 1] == [
            "came",
            *("began 3", "failed ExpertUnavailable", "paused", "resumed"),
            *("began 3", "ended", "TokenEvent"),
            *("began 1", "ended", "TokenEvent FinishEvent"),
        ]


async def test_a_slice_of_a_sweep_is_a_step_too(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        notes = Notes(r).notes
        r.submit("a", [4, 5, 6], ScoringTask(((7,), (8,)), store_kv=False))
        await r.ended("a")

        assert notes[: notes.index("FinishEvent") + 1] == [
            "came",
            *(["began 3", "ended"] * NUM_LAYERS),
            "FinishEvent",
        ]


async def test_a_step_that_fails_for_a_reason_of_its_own_fails_its_requests(
    tiny_model: Any,
) -> None:
    async with rig(tiny_model) as r:
        notes = Notes(r).notes

        async def breaks(*step: Any) -> Any:
            raise ZeroDivisionError

        r.dispatcher.dispatch = breaks  # type: ignore[method-assign]  # in place of a class of its own
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2))
        await r.ended("a")

        end = notes.index("FailureEvent") + 1
        assert notes[:end] == ["came", "began 3", "failed ZeroDivisionError", "FailureEvent"]


async def test_a_report_counts_requests_that_a_full_queue_refuses_and_none_that_can_never_run(
    tiny_model: Any,
) -> None:
    limits = replace(LIMITS, max_num_queued_reqs=1)
    async with rig(tiny_model, limits=limits) as r:
        r.submit("never", [], GenerationTask(max_tokens=2))
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2))
        r.submit("refused", [4, 5, 6], GenerationTask(max_tokens=2))
        await r.ended("never", "a", "refused")
        report = r.engine.take_report()

    assert isinstance(r.last("refused"), FailureEvent)
    assert (report.arrived, report.ended) == (2, 2)
    assert sorted(math.isinf(latency.ttft_s) for latency in report.latencies) == [False, True]
