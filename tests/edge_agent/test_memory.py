from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.services.edge_agent.memory import MemoryNeeds, RequestedSizes, plan_memory

NEEDS = MemoryNeeds(
    held=19_000_000, expert=196_608, block=131_072, row=51_200, num_experts=256, at_once=4
)
REQUESTED = RequestedSizes(kv_blocks=0, most_rows=2048, most_blocks=1024)


@given(
    st.integers(1, 1 << 34),
    st.integers(0, 1 << 33),
    st.integers(1 << 12, 1 << 26),
    st.integers(1, 1 << 22),
    st.integers(0, 2000),
)
def test_the_parts_never_take_more_than_the_limit(
    limit: int, held: int, expert: int, block: int, kv_blocks: int
) -> None:
    needs = replace(NEEDS, held=held, expert=expert, block=block)
    try:
        plan = plan_memory(limit, needs, replace(REQUESTED, kv_blocks=kv_blocks))
    except InvalidInput:
        return

    experts = plan.num_slots + plan.num_staged + plan.num_cached + needs.at_once
    taken = held + plan.kv_blocks * block + plan.max_rows * needs.row + experts * expert
    assert taken <= limit
    assert plan.num_slots >= 1
    assert plan.num_staged >= 2


def test_without_a_limit_every_expert_has_a_slot() -> None:
    plan = plan_memory(0, NEEDS, REQUESTED)

    assert plan.num_slots == NEEDS.num_experts
    assert plan.max_rows == REQUESTED.most_rows


def test_more_memory_is_never_worse() -> None:
    slots = [plan_memory(mega * 1_000_000, NEEDS, REQUESTED).num_slots for mega in range(40, 120)]

    assert slots == sorted(slots)
    assert slots[-1] > slots[0]


def test_a_limit_that_leaves_no_room_names_one_that_does() -> None:
    with pytest.raises(InvalidInput, match="give at least") as error:
        plan_memory(25_000_000, NEEDS, REQUESTED)

    least = int(error.value.fix.split("give at least ")[1].split(",")[0])
    assert plan_memory(least + (1 << 20), NEEDS, replace(REQUESTED, kv_blocks=8)).num_slots >= 1


def test_three_agents_of_the_readme_hold_every_expert() -> None:
    slots = [plan_memory(mega * 1_000_000, NEEDS, REQUESTED).num_slots for mega in (40, 40, 80)]

    assert sum(slots) >= NEEDS.num_experts
