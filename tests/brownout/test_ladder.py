"""The ladder on a simple queue: what a burst becomes without control, by the paper's rule, and by ours."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.brownout.control.contract import EXACT, QueueState, StepTaken
from moesaic.brownout.control.ladder import SHED_ABOVE, Ladder
from moesaic.errors import Overloaded
from moesaic.messages.brownout import BrownoutPolicy
from tests.brownout.queue_model import USUAL, Arrival, Engine, Outcome, poisson, run

OFF, PAPER, AUTO = (BrownoutPolicy(mode=mode) for mode in ("off", "paper", "auto"))
# Exact, this engine serves about 27 such requests a second; at threshold 0, 35.
BURST_S = (20.0, 50.0)
END_S = 70.0


def burst(policy: BrownoutPolicy, rate: float = 15.0, engine: Engine = USUAL) -> Outcome:
    begin_s, end_s = BURST_S
    rates = [(begin_s, rate), (end_s, 2 * rate), (END_S, rate)]
    return run(policy, poisson(rates), engine)


def test_of_a_burst_ours_serves_more_in_time_than_the_papers_rule_and_that_more_than_none() -> None:
    late = [burst(policy).violations(policy, *BURST_S) for policy in (OFF, PAPER, AUTO)]

    none, paper, ours = (found["late or refused"] for found in late)
    assert none > 0.4
    assert none > paper > 4 * ours
    assert ours < 0.05
    assert late[0]["refused"] == late[1]["refused"] == 0


@pytest.mark.parametrize("rate", [13.0, 15.0, 17.0, 25.0])
def test_soon_after_a_burst_everything_is_exact_again(rate: float) -> None:
    # At the highest rate the load before and after the burst is near what exact steps can do.
    found = burst(AUTO, min(rate, 17.0) if rate < 20 else 12.5)

    assert found.back_to_exact_s(BURST_S[1]) < 10
    assert found.states[-1][1].thresholds == EXACT


def test_a_light_load_is_exact_from_the_beginning_to_the_end() -> None:
    for policy in (PAPER, AUTO):
        found = run(policy, poisson([(40.0, 12.0)]))
        assert {decided.thresholds for _, decided in found.states} == {EXACT}
        assert not any(r.refused for r in found.requests)


def test_what_was_degraded_becomes_exact_under_a_light_load() -> None:
    for policy in (PAPER, AUTO):
        ladder_start = replace(Ladder(policy).state)
        assert ladder_start.thresholds == EXACT
        found = run(policy, poisson([(5.0, 40.0), (30.0, 8.0)]))
        assert found.states[-1][1].thresholds == EXACT


def test_a_phase_whose_lower_threshold_brings_nothing_becomes_exact_again() -> None:
    # The load is near what exact steps can do: lower thresholds would be tried all the time.
    found = run(AUTO, poisson([(60.0, 27.0)]), Engine(gain=0.0))

    assert found.states[-1][1].inputs.prefill_gain < 1.1
    assert min(decided.thresholds.prefill for _, decided in found.states) < 0.5
    assert found.mean_threshold(20.0, 60.0) > 0.85  # trials, with longer and longer pauses


def test_only_the_phase_that_helps_is_lowered_for_long() -> None:
    found = burst(AUTO, engine=Engine(decode_gain=0.0, answer_s=0.0001))
    begin_s, end_s = BURST_S
    late = [decided.thresholds for at, decided in found.states if begin_s + 10 < at < end_s]

    mean = [sum(column) / len(late) for column in zip(*late, strict=True)]
    assert mean[0] < 0.9
    assert mean[1] > mean[0]


def test_requests_are_shed_only_when_the_lowest_thresholds_do_not_suffice() -> None:
    for rate in (13.0, 25.0):
        found = burst(AUTO, rate)
        begun = [
            decided
            for (_, before), (_, decided) in zip(found.states, found.states[1:], strict=False)
            if decided.shedding and not before.shedding
        ]
        least_s = SHED_ABOVE * AUTO.slo_ttft_s
        assert all(decided.ttft_s is not None and decided.ttft_s > least_s for decided in begun)
        assert all(decided.thresholds.prefill < 0.3 for decided in begun)  # most work is in prompts
        assert bool(begun) == (rate == 25.0)


def test_a_noisy_engine_near_its_limit_does_not_flap() -> None:
    found = run(AUTO, poisson([(60.0, 26.0)]), Engine(noise=0.3))

    assert found.turns() < 40  # in a minute, both phases, of 1,200 decisions
    assert found.violations(AUTO)["late or refused"] < 0.1


def test_exact_requests_are_never_shed_and_served_while_others_are() -> None:
    requests = poisson([(5.0, 15.0), (25.0, 60.0)], exact_share=0.2)
    found = run(AUTO, requests)

    assert any(r.refused for r in requests if not r.exact)
    assert not any(r.refused for r in requests if r.exact)
    assert found.violations(AUTO)["refused"] > 0.1


def test_an_exact_request_that_would_wait_for_too_long_is_refused() -> None:
    policy = BrownoutPolicy(mode="auto", exact_wait_s=0.5)
    found = run(policy, poisson([(5.0, 15.0), (20.0, 60.0)], exact_share=0.9))

    refused = [r for r in found.requests if r.refused and r.exact]
    assert refused
    assert max(decided.wait_s for _, decided in found.states) < 2.0


def test_a_target_that_a_lone_request_misses_degrades_and_sheds_nobody() -> None:
    policy = BrownoutPolicy(mode="auto", slo_ttft_s=0.01, slo_tpot_s=0.001)
    found = run(policy, poisson([(20.0, 20.0)]))

    assert {decided.thresholds for _, decided in found.states} == {EXACT}
    assert not any(r.refused for r in found.requests)
    assert found.states[-1][1].unreachable == ("prefill", "decode")


@pytest.mark.parametrize("lone_s", [0.11, 0.2, 0.23])
def test_where_hardly_anybody_waits_nobody_is_shed(lone_s: float) -> None:
    """However little time the target leaves to a request that is alone."""
    slow = Engine(own_s=lone_s, prompt_s=1e-6, answer_s=1e-6, gain=0.0, noise=0.0)
    before, after = (
        [Arrival(start_s + 2.0 * i, 200, 2) for i in range(20)] for start_s in (0.0, 500.0)
    )
    found = run(
        AUTO, [*before, *(Arrival(60 + 0.01 * i, 200, 20) for i in range(300)), *after], slow
    )

    assert not any(r.refused for r in before)
    assert not any(
        r.refused for r in after[1:]
    )  # the first one comes before an idle engine has looked
    assert not found.states[-1][1].shedding


def test_long_trouble_brings_the_advice_to_scale() -> None:
    found = run(AUTO, poisson([(45.0, 40.0)]))

    advice = [at for at, decided in found.states if decided.scale]
    assert advice
    assert advice[0] > 30.0


def test_a_refused_request_hears_why_and_when_to_come_again() -> None:
    ladder = Ladder(AUTO)
    ladder.state = replace(ladder.state, shedding=True, wait_s=1.5, retry_after_s=1.4)

    with pytest.raises(Overloaded, match=r"shed: the queue takes 1.50 s") as caught:
        ladder.admit(exact=False)

    assert caught.value.retry_after_s == 1.4
    ladder.admit(exact=True)


def test_modes_that_do_not_control_keep_what_they_are_told() -> None:
    state = QueueState(1.0, 100, 100_000, 9.0, 50)
    off = Ladder(OFF)
    assert off.decide(state).thresholds == EXACT
    off.set_policy(BrownoutPolicy(mode="manual", prefill_threshold=0.4, decode_threshold=0.6))
    decided = off.decide(state)
    assert (decided.thresholds, decided.shedding) == ((0.4, 0.6), False)
    off.set_policy(OFF)
    assert off.decide(state).thresholds == EXACT


events = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.floats(1e-4, 3.0), st.integers(0, 4096), st.integers(0, 256)),
        st.tuples(st.just("token"), st.floats(0, 10.0), st.booleans(), st.booleans()),
        st.tuples(st.just("arrival"), st.floats(0, 2.0), st.integers(1, 5000), st.just(0)),
        st.tuples(st.just("end"), st.just(0.0), st.integers(0, 5000), st.just(0)),
        st.tuples(st.just("queue"), st.floats(0, 60.0), st.integers(0, 10**6), st.integers(0, 500)),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(events, st.sampled_from(["paper", "auto"]), st.floats(0, 1), st.floats(0, 1))
def test_whatever_happens_thresholds_stay_in_bounds(
    happened: list[tuple[str, float, int, int]], mode: str, prefill: float, decode: float
) -> None:
    policy = BrownoutPolicy(
        mode=mode,  # type: ignore[arg-type]  # drawn from its values
        min_prefill_threshold=prefill,
        min_decode_threshold=decode,
    )
    ladder, now_s = Ladder(policy), 0.0
    for kind, number, count, more in happened:
        now_s += 0.05
        before = ladder.state
        if kind == "step":
            step = StepTaken(now_s, number, count, more, before.thresholds)
            ladder.note_step(step, 2048)
        elif kind == "token":
            phase = "prefill" if count else "decode"
            ladder.note_latency(phase, now_s, number, exact=bool(more))
        elif kind == "arrival":
            ladder.arrivals.add(now_s, count)
        elif kind == "end":
            ladder.arrivals.ended(count)
        else:
            places = QueueState(now_s).places
            state = QueueState(now_s, more, count, number, more, free_places=more % (places + 1))
            decided = ladder.decide(state)
            assert prefill <= decided.thresholds.prefill <= 1
            assert decode <= decided.thresholds.decode <= 1
            assert decided.retry_after_s > 0
            assert not (decided.shedding and mode == "paper")
