from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.checking import violations
from moesaic.placement.decide.coverage import missing_experts
from moesaic.placement.decide.proposal import Proposal, propose


def worker(name: str, *, slots: int = 4, generation: int = 1, **fields) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        generation=generation,
        **{"role": "expert", "state": "ready", "model_digest": "model-a"} | fields,
        admin_address=f"{name}:1",
        data_address=f"{name}:2",
        slots_per_layer=slots,
        num_experts=8,
        layers=[0, 1],
    )


def placed(*workers: WorkerRecord, current: Placement | None = None) -> Placement:
    proposal = propose(current, workers).placement
    assert proposal is not None
    return replace(proposal, epoch=1)


def test_nothing_is_placed_until_the_slots_cover_all_experts():
    assert propose(None, []).waiting_for == ["expert workers: none registered"]
    some = propose(
        None, [worker("a"), worker("b", state="starting"), worker("c", role="attention")]
    )

    assert some.placement is None
    assert some.waiting_for == ["expert workers: 4 of 8 slots per layer registered"]


def test_the_first_placement_names_the_workers_in_the_order_of_their_ids():
    placement = placed(worker("b"), worker("a"))

    assert [w.worker_id for w in placement.workers] == ["a", "b"]
    assert placement.slots == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    assert placement.layers == [0, 1]


def test_nothing_is_due_while_the_placed_workers_are_those_there_are():
    current = placed(worker("a"), worker("b"))

    assert (
        propose(current, [worker("a"), worker("b"), worker("x", role="attention")]).placement
        is None
    )


def test_a_restarted_worker_gets_back_what_it_held_and_at_once_if_it_was_the_only_holder():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a"), worker("b", generation=2)])

    assert proposal.urgent
    assert proposal.placement is not None
    assert proposal.placement.slots == current.slots
    assert [w.generation for w in proposal.placement.workers] == [1, 2]


def test_a_lost_worker_is_waited_for_if_the_others_have_no_room():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a")])

    assert proposal.placement is None
    assert proposal.waiting_for == ["expert workers: 4 of 8 slots per layer registered"]


def test_survivors_with_room_take_over_and_keep_what_they_have():
    current = placed(worker("a", slots=6), worker("b", slots=6), worker("c", slots=6))

    proposal = propose(current, [worker("a", slots=6), worker("c", slots=6)])

    assert proposal.placement is not None
    assert not proposal.urgent  # every expert had a replica elsewhere
    for before, after in zip(current.slots, proposal.placement.slots, strict=True):
        assert after[0] == before[0]
        assert sorted({*after[0], *after[1]}) == list(range(8))


def test_a_draining_worker_is_replaced_while_it_still_serves():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a"), worker("b", state="draining"), worker("c")])

    assert proposal.placement is not None
    assert proposal.urgent  # it waits to leave
    assert [w.worker_id for w in proposal.placement.workers] == ["a", "c"]
    assert proposal.placement.slots == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_a_draining_worker_stays_placed_while_the_others_lack_room_and_that_is_said():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a"), worker("b", state="draining")])

    assert proposal.placement is None
    assert proposal.waiting_for == [
        "expert worker b: drains, but the others lack slots for its experts"
    ]


def test_of_many_draining_workers_only_those_stay_whose_slots_are_needed():
    current = placed(*(worker(name, slots=3) for name in "abcd"))
    records = [
        worker("a", slots=3),
        *(worker(name, slots=3, state="draining") for name in "bcd"),
    ]

    proposal = propose(current, records)

    assert proposal.placement is not None
    assert [w.worker_id for w in proposal.placement.workers] == ["a", "b", "c"]
    assert propose(replace(proposal.placement, epoch=2), records).placement is None


def test_when_all_drain_as_many_stay_as_are_needed():
    current = placed(worker("a", slots=8), worker("b", slots=8))

    proposal = propose(current, [worker(name, slots=8, state="draining") for name in "ab"])

    assert proposal.placement is not None  # one of them can leave now
    assert [w.worker_id for w in proposal.placement.workers] == ["a"]


def test_a_restarted_worker_is_placed_together_with_a_draining_one_that_is_needed():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a", state="draining"), worker("b", generation=2)])

    assert proposal.urgent
    assert proposal.placement is not None
    assert proposal.placement.slots == current.slots


def test_a_worker_that_drains_no_more_is_placed_again():
    everyone = [worker("a", slots=8), worker("b", slots=8)]
    drained = [everyone[0], worker("b", slots=8, state="draining")]
    current = placed(*drained, current=placed(*everyone))
    assert [w.worker_id for w in current.workers] == ["a"]

    assert propose(current, drained).placement is None
    again = propose(current, everyone).placement

    assert again is not None
    assert [w.worker_id for w in again.workers] == ["a", "b"]


def test_a_worker_of_another_model_is_left_out_and_said():
    current = placed(worker("a"), worker("b"))
    stranger = worker("c", slots=100, model_digest="model-b")

    proposal = propose(current, [worker("a"), worker("b"), stranger])

    assert proposal.placement is None
    assert proposal.waiting_for == ["expert worker c: has model model-b, others have model-a"]


def test_a_model_that_nobody_has_any_more_gives_way():
    current = placed(worker("a"), worker("b"))

    proposal = propose(current, [worker("a", generation=2, model_digest="model-b", slots=8)])

    assert proposal.urgent
    assert proposal.placement is not None
    assert proposal.placement.model_digest == "model-b"


def test_a_stranger_does_not_take_over_while_the_model_is_still_asked_for():
    current = placed(worker("a"), worker("b"))
    stranger = worker("c", slots=100, model_digest="model-b")
    asking = worker("x", role="attention")

    all_lost = propose(current, [stranger, asking])
    back = propose(
        current, [worker("a", generation=2), worker("b", generation=2), stranger, asking]
    )

    assert all_lost.placement is None
    assert all_lost.waiting_for == [
        "expert worker c: has model model-b, others have model-a",
        "expert workers: 0 of 8 slots per layer registered",
    ]
    assert back.placement is not None
    assert [w.worker_id for w in back.placement.workers] == ["a", "b"]


def test_the_first_placement_is_of_the_model_that_attention_workers_have():
    records = [worker("a"), worker("b"), worker("c", slots=100, model_digest="model-b")]

    with_asker = propose(None, [*records, worker("x", role="attention")]).placement
    without = propose(None, records).placement

    assert with_asker is not None
    assert without is not None
    assert (with_asker.model_digest, without.model_digest) == ("model-a", "model-b")


def test_slots_are_short_where_experts_are_missing_or_who_drains_is_held():
    current = placed(worker("a"), worker("b"))
    draining = worker("b", state="draining")

    assert propose(None, [worker("a")]).short
    assert propose(current, [worker("a")]).short
    assert propose(current, [worker("a"), draining]).short
    assert not propose(current, [worker("a"), worker("b")]).short
    assert not propose(current, [worker("a"), draining, worker("c")]).short
    assert propose(current, [worker("a"), draining, worker("c", slots=1)]).short


class Histories:
    """Workers come, go, start again, drain and change their mind, in any order."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self._generation = data, 0
        self.records: dict[str, WorkerRecord] = {}
        self.current: Placement | None = None

    def step(self) -> None:
        name = self._data.draw(st.sampled_from("abcd"))
        if name not in self.records:
            self._generation += 1
            self.records[name] = worker(
                name,
                slots=self._data.draw(st.sampled_from([0, 1, 3, 4, 8, 11])),
                generation=self._generation,
                model_digest=self._data.draw(st.sampled_from(["model-a"] * 5 + ["model-b"])),
            )
        elif self._data.draw(st.booleans()):
            del self.records[name]
        else:
            state = "ready" if self.records[name].state == "draining" else "draining"
            self.records[name] = replace(self.records[name], state=state)

    def proposed(self) -> Proposal:
        proposal = propose(self.current, self.records.values())
        if proposal.placement is not None:
            assert violations(proposal.placement, self.records.values(), None) == []
            self.current = replace(proposal.placement, epoch=1)
        return proposal


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_whatever_workers_do_every_proposal_keeps_the_rules_and_is_the_last(data):
    history = Histories(data)
    for _ in range(data.draw(st.integers(1, 12))):
        history.step()
        history.proposed()

        again = history.proposed()

        assert again.placement is None
        if history.current is None:
            continue
        live = {(r.worker_id, r.generation) for r in history.records.values()}
        held = missing_experts(history.current, live) == {}
        slots = sum(
            min(r.slots_per_layer, r.num_experts)
            for r in history.records.values()
            if r.model_digest == history.current.model_digest and r.state == "ready"
        )
        assert held or slots < 8
        assert again.short == (not held) or any(
            r.state == "draining" for r in history.records.values()
        )


def test_a_worker_on_standby_is_left_out_and_placed_once_it_is_activated():
    a, b, c = worker("a"), worker("b"), worker("c", state="standby")
    current = placed(a, b, c)
    assert [w.worker_id for w in current.workers] == ["a", "b"]
    assert propose(current, [a, b, c]) == Proposal()

    grown = propose(current, [a, b, replace(c, state="ready")]).placement

    assert grown is not None
    assert [w.worker_id for w in grown.workers] == ["a", "b", "c"]


def test_a_placed_worker_that_stands_by_is_left_out_unless_its_slots_are_needed():
    a, b, c = worker("a"), worker("b"), worker("c")
    current = placed(a, b, c)

    left_out = propose(current, [a, b, replace(c, state="standby")]).placement
    needed = propose(current, [a, replace(b, state="standby"), replace(c, state="standby")])

    assert left_out is not None
    assert [w.worker_id for w in left_out.workers] == ["a", "b"]
    assert needed.placement is not None
    assert len(needed.placement.workers) == 2
