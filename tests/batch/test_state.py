"""The life of a batch, against a second, simpler account of it."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.batch.results import ResultTally
from moesaic.batch.state import (
    AllWritten,
    Batch,
    CancelAsked,
    Event,
    Finalized,
    Impossible,
    LineError,
    Progressed,
    Rejected,
    Validated,
    advance,
)

WINDOW_S = 100


def new_batch(now: int = 0) -> Batch:
    return Batch(
        id="batch_1",
        endpoint="/v1/classify",
        input_file_id="file-1",
        completion_window="24h",
        created_at=now,
        expires_at=now + WINDOW_S,
    )


class LifeOfABatch(RuleBasedStateMachine):
    """A runner that may crash between any two steps, and a caller who may cancel at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.batch = new_batch(self.now)
        self.total = 0
        self.tally = ResultTally()
        self.stopped: str | None = None
        self.cancelled = False
        self.history: list[str] = []

    def step(self, event: Event) -> None:
        before, self.batch = self.batch, advance(self.batch, event, self.now)
        if before.status != self.batch.status:
            self.history.append(self.batch.status)

    @initialize(total=st.integers(1, 4))
    def read_the_input(self, total: int) -> None:
        self.total = total

    @rule(seconds=st.integers(0, 40))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def the_caller_cancels(self) -> None:
        if self.batch.status in ("completed", "expired", "failed"):
            with pytest.raises(Impossible):
                self.step(CancelAsked())
        else:
            self.cancelled |= self.batch.status in ("validating", "in_progress")
            self.step(CancelAsked())

    @precondition(lambda self: self.is_unread())
    @rule(good=st.booleans())
    def the_runner_reads(self, good: bool) -> None:
        self.step(Validated(self.total) if good else Rejected([LineError("bad", "bad", None, 1)]))

    @precondition(lambda self: self.is_running())
    @rule(ok=st.booleans())
    def a_result_is_written(self, ok: bool) -> None:
        if self.tally.total == self.total:
            return
        if self.batch.stop_reason(self.now) is None and ok:
            self.tally.completed += 1
        else:
            self.tally.failed += 1
        self.step(Progressed(self.tally))

    @precondition(lambda self: self.is_running() and self.tally.total == self.total)
    @rule()
    def all_are_written(self) -> None:
        if self.batch.finalizing_at is None:
            self.step(AllWritten(self.tally))
            self.stopped = self.batch.stop_reason(self.now)

    @precondition(lambda self: self.batch.status == "finalizing" or self.is_cancelled_whole())
    @rule()
    def the_files_are_made(self) -> None:
        completed, failed = self.tally.completed, self.tally.failed
        self.step(Finalized("file-o" if completed else None, "file-e" if failed else None))

    def is_unread(self) -> bool:
        return self.batch.status in ("validating", "cancelling") and not self.counts.total

    def is_running(self) -> bool:
        return self.batch.status in ("in_progress", "cancelling") and self.counts.total > 0

    def is_cancelled_whole(self) -> bool:
        counted = self.counts.completed + self.counts.failed
        return self.batch.status == "cancelling" and 0 < counted == self.counts.total

    @property
    def counts(self) -> Any:
        return self.batch.request_counts

    @invariant()
    def it_goes_forwards_only(self) -> None:
        order = "validating in_progress finalizing cancelling cancelled expired completed failed"
        places = [order.split().index(status) for status in self.history]
        assert places == sorted(set(places))

    @invariant()
    def an_end_says_what_happened(self) -> None:
        batch, counts = self.batch, self.counts
        assert batch.ended == (batch.status in ("completed", "expired", "cancelled", "failed"))
        if batch.status in ("completed", "expired"):
            assert counts.completed + counts.failed == counts.total == self.total
        if batch.status == "completed":
            assert not self.cancelled
            assert self.stopped is None
        if batch.status == "expired":
            assert self.stopped == "expired"
        if batch.status == "cancelled":
            assert self.cancelled
        if batch.ended and batch.status != "failed":
            assert bool(batch.output_file_id) == bool(counts.completed)
            assert bool(batch.error_file_id) == bool(counts.failed)

    @invariant()
    def each_state_that_was_reached_has_its_time(self) -> None:
        for status in self.history:
            reached = getattr(self.batch, f"{status}_at")
            assert reached is not None
            assert self.batch.created_at <= reached <= self.now


TestLifeOfABatch = LifeOfABatch.TestCase


@pytest.mark.parametrize(
    "event", [Validated(1), Progressed(ResultTally()), AllWritten(ResultTally())]
)
def test_nothing_more_happens_to_a_batch_that_has_ended(event: Event) -> None:
    failed = advance(new_batch(), Rejected([]), 1)

    with pytest.raises(Impossible):
        advance(failed, event, 2)


def test_more_results_than_requests_are_impossible() -> None:
    batch = advance(new_batch(), Validated(1), 1)

    with pytest.raises(Impossible):
        advance(batch, Progressed(ResultTally(completed=2)), 2)
