"""Checking, moving, pinning, damping: what the scheduler does with what policies make."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.messages.decisions import EVERY_LAYER, Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.checking import violations
from moesaic.placement.decide.damping import Damping
from moesaic.placement.decide.fitting import fitting
from moesaic.placement.decide.moves import Move, freed, moves
from moesaic.placement.decide.pins import unfulfilled, with_pins
from moesaic.placement.decide.proposal import obsolete
from moesaic.placement.policies.uniform import uniform

NUM_EXPERTS, LAYERS = 6, [1, 3]


def placement(*workers: list[int], generation: int = 1) -> Placement:
    """The same slots in both layers."""
    return placement_of(
        [placed_worker(f"w{n}", generation=generation) for n in range(len(workers))],
        workers,
        LAYERS,
        NUM_EXPERTS,
    )


def records(*slots: int, **fields: object) -> list[WorkerRecord]:
    return [
        WorkerRecord(
            **{
                "worker_id": f"w{n}",
                "generation": 1,
                "role": "expert",
                "state": "ready",
                "admin_address": "",
                "model_digest": "m",
                "slots_per_layer": count,
                "num_experts": NUM_EXPERTS,
                "layers": LAYERS,
                **fields,
            }
        )
        for n, count in enumerate(slots)
    ]


GOOD = placement([0, 1, 2, -1], [3, 4, 5, 0])


def test_a_good_placement_violates_nothing():
    assert violations(GOOD, records(4, 4), None) == []
    assert violations(GOOD, records(5, 4), GOOD) == []


def test_every_rule_that_is_broken_is_named():
    for bad, known, text in (
        (placement([0, 1, 2, 2], [3, 4, 5, 0]), records(4, 4), "an expert twice"),
        (placement([0, 1, 2, -1], [3, 4, -1, 0]), records(4, 4), "an expert without a replica"),
        (placement([0, 1, 2, 9], [3, 4, 5, 0]), records(4, 4), "an expert that does not exist"),
        (placement([0, 1, 2, -2], [3, 4, 5, 0]), records(4, 4), "an expert that does not exist"),
        (GOOD, records(3, 4), "more slots than there are"),
        (GOOD, records(4, 4, generation=2), "is not registered in generation 1"),
        (GOOD, records(4), "worker w1 is not registered"),
        (GOOD, records(4, 4, model_digest="other"), "has another model"),
        (GOOD, records(4, 4, num_experts=7), "another number of experts"),
        (GOOD, records(4, 4, layers=[1]), "has other layers"),
        (replace(GOOD, layers=[1, 1]), records(4, 4), "slots of 2 layers"),
        (replace(GOOD, slots=GOOD.slots[:1]), records(4, 4), "slots of 1 layers for 2"),
        (replace(GOOD, workers=GOOD.workers[:1]), records(4, 4), "another number of workers"),
        (replace(GOOD, workers=[], slots=[[], []]), records(4, 4), "no workers"),
        (replace(GOOD, workers=[GOOD.workers[0]] * 2), records(4, 4), "is named 2 times"),
    ):
        found = violations(bad, known, None)
        assert any(text in violation for violation in found), (text, found)


def test_memory_has_room_for_old_and_new_experts_at_once():
    after = placement([3, 1, 2, -1], [0, 4, 5, -1])  # one more expert a layer on w0 meanwhile
    known = records(4, 4, expert_bytes=10, max_expert_bytes=79)

    assert violations(after, known, None) == []
    assert violations(after, known, GOOD) == [
        "worker w0 would hold 80 bytes of experts while it changes, its limit is 79",
        "worker w1 would hold 80 bytes of experts while it changes, its limit is 79",
    ]


def test_moves_are_what_workers_must_load():
    after = placement([0, 1, 3, -1], [3, 4, 5, 2])

    assert moves(GOOD, after) == [Move(n, e, w) for n in LAYERS for e, w in ((2, "w1"), (3, "w0"))]
    assert freed(GOOD, after) == [Move(n, e, w) for n in LAYERS for e, w in ((0, "w1"), (2, "w0"))]
    assert moves(after, after) == []
    restarted = placement([0, 1, 3, -1], [3, 4, 5, 2], generation=2)
    assert len(moves(after, restarted)) == len(moves(None, after)) == 14


def test_a_pin_takes_an_empty_slot_or_that_of_the_most_replicated_expert():
    pins = [Pin(layer=EVERY_LAYER, expert=5, worker_id="w0")]
    assert with_pins(GOOD, pins).slots == [[[0, 1, 2, 5], [3, 4, 5, 0]]] * 2

    full = placement([0, 1, 2, 3], [3, 4, 5, 0])
    pinned = with_pins(full, [Pin(layer=3, expert=5, worker_id="w0")])
    assert pinned.slots[0] == full.slots[0]
    assert pinned.slots[1] == [[5, 1, 2, 3], [3, 4, 5, 0]]
    assert violations(pinned, records(4, 4), None) == []


def test_a_pin_that_cannot_be_met_is_said_and_breaks_nothing():
    tight = placement([0, 1, 2], [3, 4, 5])
    pins = [
        Pin(layer=1, expert=5, worker_id="w0"),
        Pin(layer=1, expert=0, worker_id="gone"),
    ]

    assert with_pins(tight, pins) == tight
    assert unfulfilled(tight, pins) == [
        "worker gone is not placed, and expert 0 is pinned to it",
        "worker w0 has no slot of layer 1, or no memory, to give to expert 5, which is pinned to it",
    ]


@given(
    st.lists(
        st.builds(
            Pin,
            layer=st.sampled_from([*LAYERS, EVERY_LAYER]),
            expert=st.integers(0, NUM_EXPERTS - 1),
            worker_id=st.sampled_from(["w0", "w1", "w2"]),
        ),
        max_size=12,
    )
)
def test_whatever_is_pinned_every_expert_keeps_a_replica(pins):
    slots = uniform(NUM_EXPERTS, len(LAYERS), [4, 3, 2])
    dealt = replace(placement([], [], []), slots=slots)

    assert violations(with_pins(dealt, pins), records(4, 3, 2), None) == []


def test_what_is_prepared_for_workers_that_left_or_drain_is_obsolete():
    current, planned = placement([0, 1, 2, 3, 4, 5]), placement([0, 1, 2, 3, 4, 5], [0, 1, 2])
    both = records(6, 6)

    assert obsolete(planned, current, both) == ""
    assert obsolete(planned, current, both[:1]) == "w1 left while experts were loaded"
    drains = [both[0], replace(both[1], state="draining")]
    assert obsolete(planned, current, drains) == "w1 drains while experts are loaded"
    needed = [replace(both[0], state="draining"), replace(both[1], slots_per_layer=3)]
    assert obsolete(planned, current, needed) == ""  # the other has no room for its experts


def test_who_comes_back_often_waits_longer_each_time_and_is_forgiven():
    damping, now_s = Damping(), 0.0
    waits = []
    for generation in range(1, 9):
        now_s += 1.0
        damping.note(records(4, generation=generation), now_s)
        waits.append(damping.held_back_s("w0", now_s))
    assert waits == [0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert damping.held_back_s("w0", now_s + 59.0) == 1.0
    assert damping.held_back_s("w0", now_s + 61.0) == 0.0

    damping.note(records(4, generation=8), now_s + 301.0)
    damping.note(records(4, generation=9), now_s + 302.0)
    assert damping.held_back_s("w0", now_s + 302.0) == 0.0


def test_who_cannot_load_is_left_alone_like_who_comes_back_often():
    damping = Damping()
    damping.note(records(4), 0.0)

    waits = []
    for now_s in (1.0, 2.0, 3.0):
        damping.note_failure("w0", now_s)
        waits.append(damping.held_back_s("w0", now_s))

    assert waits == [0.0, 5.0, 10.0]
    damping.note_failure("never seen", 3.0)
    assert damping.held_back_s("never seen", 3.0) == 0.0


def test_workers_that_stay_away_are_forgotten():
    damping = Damping()
    for number in range(50):  # each start has an id of its own
        damping.note(records(4, worker_id=f"expert-{number}"), number * 100.0)

    assert len(damping._generation) <= 4


def test_of_a_placement_that_does_not_fit_as_many_layers_are_had_as_fit():
    base = placement([0, 1, 2], [3, 4, 5])
    wanted = placement([0, 1, 3], [2, 4, 5])
    tight = records(3, 3, expert_bytes=1, max_expert_bytes=7)  # six experts, and one more
    roomy = records(3, 3, expert_bytes=1, max_expert_bytes=8)

    assert fitting(base, wanted, roomy, base) == wanted
    assert fitting(base, wanted, tight, base).slots == [wanted.slots[0], base.slots[1]]
    assert fitting(base, wanted, records(3, 3, expert_bytes=1, max_expert_bytes=6), base) == base
