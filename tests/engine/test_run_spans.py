"""Traced runs become few spans, whose times and sums are those of their steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moesaic.engine.run_spans import RunSpans
from moesaic.engine.sequences.requests import GenerationTask, RequestKey, ScoringTask
from moesaic.errors import MoesaicError
from moesaic.telemetry import spans
from tests.engine.rig import NUM_LAYERS, Rig, rig
from tests.telemetry.collector import PROCESS, Collector, TakenSpan, only

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED = f"00-{TRACE}-b7ad6b7169203331-01"


@asynccontextmanager
async def traced_rig(tiny_model: Any, collector: Collector) -> AsyncIterator[Rig]:
    """An engine with traces; the collector has them all after the block."""
    # The block's end waits for an exporter, which no loop may wait for.
    sent = spans.sent(collector.address, 0.0, PROCESS)
    sent.__enter__()
    try:
        async with rig(tiny_model) as r:
            made = spans.current()
            assert made is not None
            r.engine.observers.append(RunSpans(made, r.dispatcher))
            yield r
    finally:
        await asyncio.to_thread(sent.__exit__, None, None, None)


def by_parent(taken: list[TakenSpan]) -> dict[str, list[str]]:
    names = {each.span.span_id: each.name for each in taken}
    found: dict[str, list[str]] = {}
    for each in taken:
        found.setdefault(names.get(each.span.parent_span_id, "caller"), []).append(each.name)
    return {parent: sorted(children) for parent, children in found.items()}


async def test_a_run_has_its_queue_prefill_and_decode_within_its_times(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        r.submit("a", list(range(4, 34)), GenerationTask(max_tokens=5), traceparent=TRACED)
        await r.ended("a")
    taken = collector.of(TRACE)
    run, queue = only(taken, "run"), only(taken, "queue")
    prefill, decode = only(taken, "prefill"), only(taken, "decode")

    assert by_parent(taken) == {
        "caller": ["run"],
        "run": ["decode", "prefill", "queue"],
        "prefill": ["step"],
        "decode": ["step"],
    }
    times = [*run.times[:1], *queue.times, *prefill.times, *decode.times, *run.times[1:]]
    assert times == sorted(times)
    # The prompt is longer than a step, and the last token of the prompt gives the first of the answer.
    assert (prefill.attributes["moesaic.steps"], prefill.attributes["moesaic.rows"]) == (2, 30)
    assert (decode.attributes["moesaic.steps"], decode.attributes["moesaic.rows"]) == (4, 4)
    assert run.attributes["gen_ai.usage.input_tokens"] == 30
    assert run.attributes["gen_ai.usage.output_tokens"] == 5
    assert run.attributes["moesaic.outcome"] == "length"


async def test_runs_without_a_sampled_trace_have_no_spans(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=3))
        r.submit("b", [4, 5, 6], GenerationTask(max_tokens=3), traceparent=TRACED[:-1] + "0")
        r.submit("c", [4, 5, 6], GenerationTask(max_tokens=3), traceparent="no context")
        await r.ended("a", "b", "c")

    assert collector.taken == []


async def test_a_long_answer_has_as_few_spans_as_a_short_one(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=100), traceparent=TRACED)
        await r.ended("a")
    taken = collector.of(TRACE)
    decode = only(taken, "decode")
    steps = [each for each in taken if each.name == "step"]

    # Of the 99 steps, the first, the eighth and the sixty-fourth.
    assert decode.attributes["moesaic.steps"] == 99
    assert [each.attributes["moesaic.steps"] for each in steps] == [1, 1, 1]
    assert {each.span.parent_span_id for each in steps} == {decode.span.span_id}
    for each in steps:
        assert decode.times[0] <= each.times[0] <= each.times[1] <= decode.times[1]
    assert (
        sum(s.attributes["moesaic.computed_s"] for s in steps)
        < (decode.attributes["moesaic.computed_s"])
    )


async def test_runs_that_share_steps_each_count_their_own_rows(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        for name, length in (("a", 3), ("b", 4), ("c", 5)):
            traced = {} if name == "c" else {"traceparent": TRACED}
            r.submit(name, range(4, 4 + length), GenerationTask(max_tokens=4), **traced)
        await r.ended("a", "b", "c")
    taken = collector.of(TRACE)
    prefills = [each.attributes for each in taken if each.name == "prefill"]

    assert sorted(each["moesaic.rows"] for each in prefills) == [3, 4]
    assert {each["moesaic.batch_rows"] for each in prefills} == {12}


async def test_a_step_that_failed_counts_on_the_run_and_in_no_phase(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        r.dispatcher.failures = 2
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2), traceparent=TRACED)
        await r.ended("a")
    taken = collector.of(TRACE)

    assert only(taken, "run").attributes["moesaic.failed_steps"] == 2
    assert only(taken, "prefill").attributes["moesaic.steps"] == 1


async def test_a_run_that_fails_tells_its_error_and_a_cancelled_one_that_it_was(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        r.dispatcher.gone = True
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2), traceparent=TRACED)
        await r.dispatcher.sought.wait()
        r.engine.cancel(RequestKey("a"))
        r.submit("b", [4, 5, 6], GenerationTask(max_tokens=2), deadline_s=0.0, traceparent=TRACED)
        await r.ended("b")
    taken = collector.of(TRACE)
    runs = {each.attributes["moesaic.run_id"]: each for each in taken if each.name == "run"}

    assert by_parent(taken) == {"caller": ["run", "run"], "run": ["queue", "queue"]}
    assert runs["a"].attributes["moesaic.outcome"] == "cancelled"
    assert runs["b"].attributes["moesaic.outcome"] == "failed"
    assert runs["b"].attributes["error.type"] == "deadline_exceeded"
    assert runs["b"].span.status.code == runs["b"].span.status.STATUS_CODE_ERROR
    assert runs["a"].span.status.code == runs["a"].span.status.STATUS_CODE_UNSET


async def test_slices_of_a_sweep_are_steps_of_its_prefill(
    tiny_model: Any, collector: Collector
) -> None:
    async with traced_rig(tiny_model, collector) as r:
        task = ScoringTask(((7,), (8,)), store_kv=False)
        r.submit("a", [4, 5, 6], task, traceparent=TRACED)
        await r.ended("a")
    prefill = only(collector.of(TRACE), "prefill")

    assert prefill.attributes["moesaic.steps"] == NUM_LAYERS


async def test_a_line_of_the_log_about_requests_names_them_and_their_traces(
    tiny_model: Any, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    async with traced_rig(tiny_model, collector) as r:

        async def breaks(*step: Any) -> Any:
            raise ZeroDivisionError

        r.dispatcher.dispatch = breaks  # type: ignore[method-assign]  # in place of a class of its own
        r.submit("a", [4, 5, 6], GenerationTask(max_tokens=2), traceparent=TRACED)
        await r.ended("a")
    told = capsys.readouterr().out
    event = r.last("a")

    assert "step.failed" in told
    assert TRACE in told
    assert isinstance(getattr(event, "error", None), MoesaicError)
    assert only(collector.of(TRACE), "run").attributes["moesaic.outcome"] == "failed"
