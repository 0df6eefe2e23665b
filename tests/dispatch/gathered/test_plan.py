"""What is where, in how many bytes; a plan that does not fit is refused with numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.gathered.plan import GatherPlan, plan_gather
from moesaic.errors import InvalidInput
from moesaic.experts.pull.ranges import Share, messages_of, rows_of


@st.composite
def plans(draw: st.DrawFn) -> GatherPlan:
    count = draw(st.integers(1, 6))
    return plan_gather(
        sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12))),
        draw(st.integers(count, 40)),
        64 * draw(st.integers(1, 100_000)),
        share=Share(draw(st.integers(0, count - 1)), count),
        offload=draw(st.booleans()),
        window=draw(st.integers(1, 20)),
        on_device=draw(st.booleans()),
    )


@given(plans())
def test_every_expert_is_either_in_memory_or_has_one_row_in_the_ring(plan: GatherPlan) -> None:
    assert sorted(plan.in_memory + plan.gathered) == list(range(plan.num_experts))


@given(plans())
def test_the_ring_has_one_run_of_rows_for_each_share(plan: GatherPlan) -> None:
    rows = [e for share in plan.gathered_shares for e in share.experts(plan.num_experts)]

    assert tuple(rows) == plan.gathered


@given(plans())
def test_memory_is_the_first_layer_the_share_and_the_window(plan: GatherPlan) -> None:
    slots = min(plan.window + 1, len(plan.layers) - 1)
    held = 0 if plan.offload else len(plan.share.experts(plan.num_experts))
    per_layer = (len(plan.layers) - 1) * held + slots * (plan.num_experts - held)

    host, first = per_layer * plan.expert_bytes, plan.layer_bytes
    if plan.on_device:
        assert plan.total_bytes == (1 + slots) * plan.layer_bytes
        assert plan.host_bytes - plan.message_bytes == host
    else:
        assert plan.total_bytes - plan.message_bytes == first + host
        assert plan.host_bytes == 0


@given(plans())
def test_a_buffer_of_a_device_has_one_row_for_every_expert(plan: GatherPlan) -> None:
    assert sorted(plan.buffered) == list(range(plan.num_experts))
    assert plan.buffered[: len(plan.gathered)] == plan.gathered


@given(plans())
def test_a_budget_of_a_byte_less_is_refused_and_what_is_said_to_fit_fits(plan: GatherPlan) -> None:
    facts = (plan.layers, plan.num_experts, plan.expert_bytes)
    options = {
        "share": plan.share,
        "budget_bytes": plan.total_bytes - 1,
        "on_device": plan.on_device,
    }

    assert plan_gather(
        *facts,
        share=plan.share,
        offload=plan.offload,
        window=plan.window,
        budget_bytes=plan.total_bytes,
        on_device=plan.on_device,
    )
    with pytest.raises(InvalidInput) as refused:
        plan_gather(*facts, **options, offload=plan.offload, window=plan.window)
    assert str(plan.total_bytes) in refused.value.fix
    if "--offload would need" in refused.value.fix:
        plan_gather(*facts, **options, offload=True, window=plan.window)


@given(st.integers(0, 500), st.integers(1, 5), st.integers(1, 70))
def test_runs_cover_every_byte_once_whoever_takes_them(
    size: int, holders: int, row_bytes: int
) -> None:
    runs = messages_of(size, row_bytes)

    taken = [run for holder in range(holders) for run in runs[holder::holders]]
    covered = sorted(byte for start, length in taken for byte in range(start, start + length))
    assert covered == list(range(size))
    some = runs[:2]
    touched = {byte // row_bytes for start, length in some for byte in range(start, start + length)}
    assert rows_of(some, row_bytes) == sorted(touched)


def test_twelve_layers_fit_into_a_quarter_of_their_memory() -> None:
    plan = plan_gather(range(12), 16, 64, share=Share(), offload=True, window=1)

    assert plan.total_bytes * 4 == plan.resident_bytes


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "0/0"])
def test_a_share_is_an_index_below_a_count(text: str) -> None:
    with pytest.raises(InvalidInput, match="share"):
        Share.parse(text)


def test_more_workers_than_experts_are_refused() -> None:
    with pytest.raises(InvalidInput, match="share"):
        plan_gather(range(3), 2, 64, share=Share(0, 3), offload=False, window=1)
