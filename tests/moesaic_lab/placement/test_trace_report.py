import numpy as np

from moesaic_lab.placement.trace_report import (
    activated,
    evenly,
    halves,
    largest_by_policy,
    part_facts,
)
from tests.placement.traffic.test_trace import trace_of


def test_placements_are_measured_on_what_they_were_not_made_from() -> None:
    trace = trace_of(rows=(2,) * 12)

    seen, held_out = halves(trace, ["prefill"])

    assert {id(step) for step in seen + held_out} == {
        id(s) for s in trace.selected(None, ["prefill"])
    }
    assert not {id(step) for step in seen} & {id(step) for step in held_out}
    assert evenly(range(10), 3) == [0, 4, 9]  # type: ignore[arg-type, comparison-overlap]


def test_the_report_has_every_part_and_phase_and_no_schedule_beats_ours() -> None:
    trace = trace_of(rows=(3,) * 24)

    facts, largest = part_facts(trace), largest_by_policy(trace, [4, 4], 10)

    assert {(fact["part"], fact["phase"]) for fact in facts} == {
        (part, phase) for part in "ab" for phase in ("decode", "prefill", "mixed")
    }
    assert sum(fact["rows"] for fact in facts) == trace.num_rows
    for policies in largest.values():
        for schedules in policies.values():
            assert schedules["aebs"] == min(schedules.values())


def test_every_activated_expert_is_counted_once_by_aebs() -> None:
    trace = trace_of(rows=(3, 3))
    placed = [[[0, 1, 2, 3], [2, 3, 4, 5]]] * 3

    counts = activated(placed, trace.steps, "aebs")

    for layer in range(3):
        for at, step in enumerate(trace.steps):
            assert counts[layer, at].sum() == len(np.unique(step.topk_ids[layer]))
