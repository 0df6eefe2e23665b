"""United experts in placements: all are there, apart from what they stand in for, and own slots stay."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.placements import placed_worker
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.stand_ins import own_part, with_substitution
from moesaic.placement.policies.uniform import uniform


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts = draw(st.integers(1, 20))
    slots = draw(st.lists(st.integers(1, num_experts), min_size=1, max_size=5))
    while sum(slots) < num_experts:
        slots.append(num_experts)
    workers = [placed_worker(f"e{n}") for n in range(len(slots))]
    order = draw(st.permutations(range(num_experts)))
    layers = uniform(num_experts, 2, slots)
    dealt = [[[order[e] if e >= 0 else e for e in held] for held in layer] for layer in layers]
    return Placement(
        epoch=1,
        model_digest="m",
        num_experts=num_experts,
        workers=workers,
        layers=[0, 1],
        slots=dealt,
    )


ways = st.integers(2, 8)


@given(placements(), ways)
def test_all_united_experts_are_placed_behind_the_own_ones_which_stay(placement, way) -> None:
    degraded = with_substitution(placement, Substitution(way=way, instead="united"))

    assert own_part(degraded) == placement
    assert degraded.num_own == placement.num_experts
    united = range(placement.num_experts, degraded.num_experts)
    assert len(united) == -(-placement.num_experts // way)
    for layer, before in zip(degraded.slots, placement.slots, strict=True):
        for held, own in zip(layer, before, strict=True):
            assert held[: len(own)] == own
            assert set(held[len(own) :]) <= set(united)
            assert len(held[len(own) :]) == len(set(held[len(own) :]))
        assert {expert for held in layer for expert in held} >= set(united)


@given(placements(), ways)
def test_whichever_worker_is_lost_the_others_stand_in_for_all_its_experts(placement, way) -> None:
    degraded = with_substitution(placement, Substitution(way=way, instead="united"))

    for lost in range(len(placement.workers) if len(placement.workers) > 1 else 0):
        for layer in degraded.slots:
            there = {expert for n, held in enumerate(layer) if n != lost for expert in held}
            for expert in range(placement.num_experts):
                assert expert in there or placement.num_experts + expert // way in there


@given(placements(), ways)
def test_another_substitution_replaces_the_one_before(placement, way) -> None:
    before = with_substitution(placement, Substitution(way=way, instead="united"))
    for substitution in (
        Substitution(instead="fewer"),
        Substitution(way=2, instead="united", rule="instances"),
    ):
        assert with_substitution(before, substitution) == with_substitution(placement, substitution)
    assert with_substitution(before, Substitution()) == placement
