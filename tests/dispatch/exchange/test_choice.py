"""The choice follows predictions at first, and what trials have shown in the end."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.exchange.choice import ExchangeChooser
from moesaic.dispatch.exchange.costs import CASES, Case
from moesaic.dispatch.exchange.trials import ATTEND_EVERY_S, Conductor, Slot, Trial

seconds = st.fixed_dictionaries({case: st.floats(1e-5, 1.0) for case in CASES})


@given(seconds)
def test_before_anything_is_known_the_least_prediction_wins(model_s: dict[Case, float]) -> None:
    choice = ExchangeChooser().choose("kind", model_s)

    assert not choice.exploring
    assert choice.changed
    assert choice.predicted_s == pytest.approx(model_s)
    assert model_s[choice.case] == min(model_s.values())


@given(seconds, st.floats(0, 1.0))
def test_what_is_learned_outside_trials_makes_predictions_and_no_choice(
    model_s: dict[Case, float], rest_s: float
) -> None:
    chooser = ExchangeChooser()
    best = chooser.choose("kind", model_s).case
    for _ in range(100):
        chooser.learn("kind", best, model_s[best], model_s[best] + rest_s)

    choice = chooser.choose("kind", model_s)

    assert choice.case == best
    assert not choice.changed
    assert choice.predicted_s[best] == pytest.approx(model_s[best] + rest_s)


@given(seconds, st.sampled_from(CASES))
def test_a_slot_is_followed_unless_its_way_should_take_far_longer(
    model_s: dict[Case, float], case: Case
) -> None:
    choice = ExchangeChooser().choose("kind", model_s, Slot((0.0, 0), case, 1.0, settled=True))

    least = min(model_s, key=model_s.__getitem__)
    followed = model_s[case] <= 3 * model_s[least]
    assert choice.case == (case if followed else least)
    assert choice.exploring == (followed and case != least)


@dataclass
class Node:
    """One attention node, that exchanges all the time, and asks the conductor as ``Attendance`` does."""

    name: str
    model_s: dict[Case, float]
    chooser: ExchangeChooser = field(default_factory=ExchangeChooser)
    trial: Trial | None = None
    going: Case = "direct"
    gone: list[Case] = field(default_factory=list)

    def attend(self, conductor: Conductor, now_s: float) -> None:
        over = self.trial is None or now_s >= self.trial.end_s
        if over:
            self.chooser.finish_trial()
        wished_s = self.chooser.wished_slot_s(now_s) if over else 0.0
        self.trial = conductor.beat(self.name, self.name, now_s, slot_s=wished_s).trial

    def choose(self, now_s: float) -> None:
        slot = self.trial.slot(now_s) if self.trial is not None else None
        self.going = self.chooser.choose("kind", self.model_s, slot).case
        self.gone.append(self.going)

    def learn(self, now_s: float, taken_s: float) -> None:
        slot = self.trial.slot(now_s) if self.trial is not None else None
        shown = slot if slot is not None and slot.settled else None
        case = self.going
        self.chooser.learn("kind", case, self.model_s[case], taken_s, shown, now_s)


def live(nodes: list[Node], takes: Callable[[list[Case]], list[float]], until_s: float) -> None:
    """Let nodes exchange side by side; what each takes depends on how all go."""
    conductor, now_s, asks_s = Conductor(), 0.0, 0.0
    while now_s < until_s:
        if now_s >= asks_s:
            asks_s += ATTEND_EVERY_S
            for node in nodes:
                node.attend(conductor, now_s)
        for node in nodes:
            node.choose(now_s)
        taken = takes([node.going for node in nodes])
        for node, taken_s in zip(nodes, taken, strict=True):
            node.learn(now_s, taken_s)
        now_s += max(taken)


def test_the_fastest_way_is_found_though_links_say_otherwise_and_the_machine_drifts() -> None:
    right = 0
    for seed in range(20):
        rng = random.Random(seed)
        truth: dict[Case, float] = {case: 1e-2 * rng.uniform(1.0, 1.6) for case in CASES}
        nodes = [Node(name, {c: 1e-2 * rng.uniform(1.0, 2.0) for c in CASES}) for name in "ab"]

        def takes(
            going: list[Case], truth: dict[Case, float] = truth, rng: random.Random = rng
        ) -> list[float]:
            drift = rng.uniform(0.8, 1.2)
            return [drift * truth[case] * rng.gauss(1.0, 0.1) for case in going]

        live(nodes, takes, 40.0)
        right += all(
            truth[max(CASES, key=node.gone[-100:].count)] <= 1.05 * min(truth.values())
            for node in nodes
        )

    assert right >= 19  # of 20


def test_nodes_find_together_what_is_fastest_if_all_do_it() -> None:
    """Sending everything everywhere is quickest for one alone, whatever the others do; if all do it,
    it is slowest."""

    def takes(going: list[Case]) -> list[float]:
        load_s = sum({"direct": 10e-3, "case-1": 5e-3, "case-2": 4e-3}[case] for case in going)
        return [load_s * (0.5 if case == "direct" else 1.0) for case in going]

    nodes = [Node(name, {"direct": 1e-3, "case-1": 2e-3, "case-2": 2e-3}) for name in "abc"]

    live(nodes, takes, 30.0)

    alone, together = takes(["direct", "case-2", "case-2"])[0], takes(["direct"] * 3)[0]
    assert alone < takes(["case-2"] * 3)[0] < together
    for node in nodes:
        assert max(CASES, key=node.gone[-100:].count) == "case-2"


def test_once_it_is_settled_trials_are_rare() -> None:
    truth: dict[Case, float] = {"direct": 3e-2, "case-1": 2e-2, "case-2": 1.5e-2}
    node = Node("a", {"direct": 1e-2, "case-1": 2e-2, "case-2": 2e-2})

    live([node], lambda going: [truth[going[0]]], 100.0)

    late = node.gone[len(node.gone) // 2 :]
    assert set(late) == {"case-2"}
    assert node.chooser.is_settled


def test_a_fastest_way_that_changes_is_found_again() -> None:
    slow, fast = 2e-2, 1e-2
    truth: dict[Case, float] = {"direct": fast, "case-1": slow, "case-2": slow}
    node = Node("a", dict.fromkeys(CASES, 1e-2))
    live([node], lambda going: [truth[going[0]]], 30.0)
    assert node.going == "direct"

    truth |= {"direct": slow, "case-2": fast}
    node.trial = None
    live([node], lambda going: [truth[going[0]]], 250.0)

    assert node.going == "case-2"


def test_a_way_that_should_take_far_longer_is_never_tried() -> None:
    node = Node("a", {"direct": 1e-3, "case-1": 1.0, "case-2": 1e-3})

    live([node], lambda going: [2e-3], 30.0)

    assert set(node.gone) == {"direct", "case-2"}


def test_kinds_are_learned_apart() -> None:
    model_s: dict[Case, float] = {"direct": 1e-3, "case-1": 2e-3, "case-2": 3e-3}
    chooser = ExchangeChooser()
    for sweep in range(4):
        for case, taken_s in (("direct", 9e-3), ("case-2", 3e-3)):
            for _ in range(2):
                slot = Slot((0.0, sweep), case, 1.0, settled=True)  # type: ignore[arg-type]
                chooser.learn("few rows", case, 1e-3, taken_s, slot)  # type: ignore[arg-type]
    chooser.finish_trial()

    assert chooser.choose("few rows", model_s).case == "case-2"
    assert chooser.choose("many rows", model_s).case == "direct"


def test_a_way_that_was_slow_while_the_machine_was_busy_is_tried_again() -> None:
    """It was predicted to take far longer for ever after, and so never gone again."""
    truth: dict[Case, float] = {"direct": 1.5e-2, "case-1": 1.5e-2, "case-2": 1e-2}
    node = Node("a", {"direct": 1e-2, "case-1": 1.2e-2, "case-2": 1.2e-2})
    for _ in range(20):
        node.chooser.learn("kind", "case-2", 1.2e-2, 5.0)

    live([node], lambda going: [truth[going[0]]], 30.0)

    assert node.going == "case-2"


def test_slow_exchanges_are_tried_as_well() -> None:
    """Few of them fit between two questions for wishes."""
    truth: dict[Case, float] = {"direct": 0.6, "case-1": 0.8, "case-2": 0.4}
    node = Node("a", {"direct": 0.3, "case-1": 0.4, "case-2": 0.4})

    live([node], lambda going: [truth[going[0]]], 200.0)

    assert node.going == "case-2"
