from moesaic.transport.pulse import EJECT_S, INTERVAL_S, SUSPECT_S, Pulse, Verdict


def silent_for(pulse: Pulse, start: float, seconds: float) -> list[Verdict]:
    beats = int(seconds / INTERVAL_S)
    return [pulse.check(start + beat * INTERVAL_S, busy=False) for beat in range(1, beats + 1)]


def test_a_silent_peer_is_suspected_once_and_then_ejected() -> None:
    verdicts = silent_for(Pulse(0.0), 0.0, EJECT_S + INTERVAL_S)

    assert verdicts.count(Verdict.WARN) == 1
    assert verdicts[int(SUSPECT_S / INTERVAL_S)] is Verdict.WARN
    assert verdicts[-1] is Verdict.EJECT
    assert Verdict.EJECT not in verdicts[:-1]


def test_a_peer_that_answers_is_left_alone() -> None:
    pulse = Pulse(0.0)
    verdicts = []
    for beat in range(1, 40):
        verdicts.append(pulse.check(beat * INTERVAL_S, busy=False))
        pulse.heard(beat * INTERVAL_S)

    assert set(verdicts) == {Verdict.PING}


def test_an_outstanding_exchange_has_its_own_deadline() -> None:
    pulse = Pulse(0.0)
    verdicts = [pulse.check(beat * INTERVAL_S, busy=True) for beat in range(1, 40)]

    assert set(verdicts) == {Verdict.PING}


def test_our_own_sleep_is_not_the_peers_silence() -> None:
    pulse = Pulse(0.0)

    assert pulse.check(60.0, busy=False) is Verdict.PING
    assert pulse.check(60.0 + INTERVAL_S, busy=False) is Verdict.PING
