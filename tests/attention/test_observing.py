"""An engine that says nothing, by the layers that it computes meanwhile."""

from moesaic.services.attention.observing import STUCK_S, Vitals


def test_a_step_of_any_length_lives_as_long_as_layers_go_by() -> None:
    vitals = Vitals()

    assert all(vitals.live(layer, now_s=layer * STUCK_S * 0.9) for layer in range(48))
    assert not vitals.live(47, now_s=1000.0)


def test_a_silence_counts_from_its_own_beginning() -> None:
    vitals = Vitals()
    assert vitals.live(7, now_s=0.0)
    vitals.idle()

    assert vitals.live(7, now_s=1000.0)
    assert not vitals.live(7, now_s=1000.0 + STUCK_S)
