"""A request of a real suite is one trace, at a collector that may also be gone."""

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.suites import SERVED_PROMPT, Suite, running
from tests.telemetry.collector import AT_ONCE, Collector, TakenSpan, collecting, only
from tests.waiting import eventually

pytestmark = pytest.mark.suite

CALLER = "b7ad6b7169203331"
BODY = {"model": "demo", "prompt": SERVED_PROMPT, "max_tokens": 20, "ignore_eos": True}
HTTP = "POST /v1/completions"
RUN = (HTTP, "execute", "run")
OF_ANY = {(HTTP,), (HTTP, "route"), RUN[:2], RUN, (*RUN, "queue")}
OF_STEPS = {(*RUN, "prefill"), (*RUN, "decode"), (*RUN, "decode", "step")}
OF_EXPERTS = {(*path, "experts") for path in OF_STEPS}


def asked(suite: Suite, trace: str, *, sampled: bool = True, **more: Any) -> int:
    """Ask for a completion as part of a trace; the status of the answer."""
    headers = {"traceparent": f"00-{trace}-{CALLER}-{'01' if sampled else '00'}"}
    with suite.client() as client:
        return client.post("/v1/completions", json=BODY | more, headers=headers).status_code


def traced(suite: Suite, collector: Collector, trace: str) -> list[TakenSpan]:
    """Ask as part of a trace, and wait for all of it."""
    assert asked(suite, trace) == 200

    def whole() -> list[TakenSpan]:
        found = collector.of(trace)
        # Each service sends the spans around its others last.
        return found if {HTTP, "run"} <= {each.name for each in found} else []

    return eventually(whole)


def check_tree(taken: list[TakenSpan]) -> set[tuple[str, ...]]:
    """Check that there is one tree of spans whose times lie within each other; the paths of its names."""
    by_id = {each.span.span_id: each for each in taken}
    assert len(by_id) == len(taken)
    paths = set()
    for each in taken:
        path = [each]
        while (parent := by_id.get(path[-1].span.parent_span_id)) is not None:
            path.append(parent)
        assert path[-1].span.parent_span_id.hex() == CALLER
        for child, around in pairwise(path):
            assert around.times[0] <= child.times[0] <= child.times[1] <= around.times[1]
        paths.add(tuple(step.name for step in reversed(path)))
    return paths


def test_a_request_to_a_suite_with_expert_workers_is_one_trace(
    tmp_path: Path, collector: Collector
) -> None:
    flags = f"--otlp-endpoint={collector.address}", "--trace-share=0"
    with running(tmp_path, *flags, settings=AT_ONCE) as suite:
        suite.until_serving()
        taken = traced(suite, collector, "1" * 32)
        unsampled, by_chance = asked(suite, "2" * 32, sampled=False), suite.cli("generate", "Once")
        refused = asked(suite, "3" * 32, max_tokens=-1)
        lines = eventually(
            lambda: [each for each in suite.log("gateway") if each.get("trace_id") == "1" * 32]
        )

    assert check_tree(taken) == OF_ANY | OF_STEPS | OF_EXPERTS
    http, route, run = only(taken, HTTP), only(taken, "route"), only(taken, "run")
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["gen_ai.request.model"] == "demo"
    assert http.attributes["gen_ai.usage.output_tokens"] == 20
    assert route.attributes["moesaic.worker_id"] == run.instance == "attention-0"
    assert only(taken, "decode").attributes["moesaic.steps"] == 19
    workers = {each.attributes["moesaic.worker_id"] for each in taken if each.name == "experts"}
    assert workers == {"expert-0", "expert-1"}
    # The run is linked to the trace of the placement under which it was computed.
    [link] = run.span.links
    placing = collector.of(link.trace_id.hex())
    [epoch] = [each for each in placing if each.span.span_id == link.span_id]
    assert run.attributes["moesaic.epochs"] == [str(epoch.attributes["moesaic.epoch"])]
    names = {each.name for each in placing}
    assert names >= {"decision", "epoch", "prepare", "load", "commit", "confirm"}
    # The others: the caller decided against it, the share is 0, and a refusal reached no worker.
    assert (unsampled, by_chance.returncode) == (200, 0)
    assert 400 <= refused < 500
    [only_http] = collector.of("3" * 32)
    assert only_http.attributes["http.response.status_code"] == refused
    requests = {each.span.trace_id for each in collector.taken if each.service == "moesaic-gateway"}
    assert requests == {bytes.fromhex("1" * 32), bytes.fromhex("3" * 32)}
    assert [each["event"] for each in lines] == ["request.finished"]
    assert lines[0]["request_id"] == http.attributes["moesaic.request_id"]
    assert run.attributes["moesaic.run_id"] == f"{lines[0]['answer_id']}-0"


def test_a_collector_that_is_gone_costs_a_local_suite_nothing_but_spans(tmp_path: Path) -> None:
    # The suite is there for longer than the collector, and stops as ever, with spans that nobody takes.
    with ExitStack() as stack:
        with collecting() as collector:
            settings = AT_ONCE | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address}
            up = running(tmp_path, "--topology", "local", settings=settings)
            suite = stack.enter_context(up)
            suite.until_serving()
            taken = traced(suite, collector, "4" * 32)
        statuses = [asked(suite, f"{number:032x}") for number in range(1, 9)]
        eventually(
            lambda: [
                each
                for each in suite.log("gateway")
                if each["event"] == "library.logged" and "traces" in each["message"]
            ]
        )

    assert check_tree(taken) == OF_ANY | OF_STEPS
    assert statuses == [200] * 8
