"""The series of experts' load: bounded, and true."""

import pytest
import torch
from prometheus_client import REGISTRY

from moesaic.experts.activations import ActivationMeter
from moesaic.experts.load_series import show_load
from moesaic.messages.activation import ActivationWindow


def window_of(meter: ActivationMeter) -> ActivationWindow:
    report = meter.report(worker_id="e", generation=1, model_digest="m", epoch=1)
    return report.window


def shown() -> dict[tuple[int, int], float]:
    return {
        (int(sample.labels["layer"]), int(sample.labels["expert"])): sample.value
        for metric in REGISTRY.collect()
        if metric.name == "moesaic_expert_choices_per_second"
        for sample in metric.samples
    }


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture
def window() -> ActivationWindow:
    meter = ActivationMeter(4)
    meter.record(1, 901, ids([0, 1], [0, 2], [0, 1]), 2)
    meter.record(1, 902, ids([3, 2]), 2)
    return window_of(meter)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 99])
def test_so_many_experts_have_series_as_the_setting_says_the_most_chosen_ones(
    window: ActivationWindow, most: int
) -> None:
    show_load(window, most)

    order = [((901, 0), 3), ((901, 1), 2), ((901, 2), 1), ((902, 2), 1), ((902, 3), 1)]
    expected = {key: count / window.window_s for key, count in order[:most]}
    assert shown() == pytest.approx(expected)


def test_layers_count_every_choice_and_tell_how_uneven_they_are(window: ActivationWindow) -> None:
    def value(name: str) -> float:
        return REGISTRY.get_sample_value(f"moesaic_layer_expert_{name}", {"layer": "901"}) or 0.0

    before = value("choices_total")
    show_load(window, 0)

    assert value("choices_total") == before + 6
    assert value("imbalance_ratio") == 3 / (6 / 4)


def test_experts_without_traffic_lose_their_series(window: ActivationWindow) -> None:
    show_load(window, 64)
    show_load(window_of(ActivationMeter(4)), 64)

    assert shown() == {}
