import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.performance import PART_TERMS
from moesaic_lab.simulation.elastic.fleets import slowed
from moesaic_lab.simulation.elastic.hardware import DeviceProfile, device_profile, device_profiles
from moesaic_lab.simulation.elastic.model_shapes import model_shape, model_shapes
from moesaic_lab.simulation.elastic.roofline import roofline

NO_FIGURES = {"title", "sources", "assumptions", "price_per_hour"}


def leaves(profile: DeviceProfile) -> set[str]:
    links = {
        f"{way}.{each}"
        for way in ("intra", "inter")
        for each in ("bytes_per_s", "hop_s", "message_s")
    }
    own = set(profile.__struct_fields__) - NO_FIGURES - {"intra", "inter"}
    return own | links


@pytest.mark.parametrize("name", sorted(device_profiles()))
def test_every_figure_of_a_device_has_a_source_or_is_called_an_assumption(name: str) -> None:
    profile = device_profile(name)

    told = {field for key in (*profile.sources, *profile.assumptions) for field in key.split(", ")}

    assert leaves(profile) - {"devices_per_node"} <= told


# As published: all parameters, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v2", 236),
        ("deepseek-v3", 671),
        ("qwen3-235b", 235),
        ("qwen3-30b", 30.5),
        ("mixtral-8x7b", 46.7),
    ],
)
def test_models_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    shape = model_shape(name)

    parameters = (shape.num_experts * shape.slot_bytes + shape.attention_bytes) / 2

    assert parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="h100"):
        device_profile("tpu")
    with pytest.raises(InvalidInput, match="qwen3-235b"):
        model_shape("gpt")


def test_a_model_from_rates_has_the_terms_that_measured_ones_have() -> None:
    for model in model_shapes().values():
        parts = roofline(device_profile("h100"), model).parts

        assert all(len(cost.unit_s) == len(cost.terms) for cost in parts.values())
        assert {part: cost.terms for part, cost in parts.items()}.items() <= PART_TERMS.items()


def test_experts_take_as_long_as_reading_their_weights() -> None:
    device, model = device_profile("h100"), model_shape("deepseek-v2")
    experts = roofline(device, model).parts["experts"]

    ten, eleven = (experts.seconds(1, activated, 0) for activated in (10, 11))

    rate = device.memory_bytes_per_s * device.memory_share
    assert eleven - ten == pytest.approx(model.expert_bytes / rate)


def test_a_slower_pace_stretches_every_part() -> None:
    model = roofline(device_profile("h100"), model_shape("deepseek-v2"))

    slow = slowed(model, 3.0)

    for part, cost in model.parts.items():
        ones = [1.0] * len(cost.terms)
        assert slow.parts[part].seconds(*ones) == pytest.approx(3 * cost.seconds(*ones))
