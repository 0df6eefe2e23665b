"""A mode has its own settings, and those of other modes are refused by one rule."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel

from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.edge_agent.settings import EdgeAgentSettings
from moesaic.usage.flags import flags_of
from moesaic.usage.modes import foreign, missing_in, modes_of
from moesaic.usage.reading import BadSettings, flags_in, read_settings


class Common(BaseModel):
    dispatch: Literal["near", "far", "there"] = "near"
    rows: int = 1


class Walks(Common):
    modes: ClassVar[tuple[str, ...]] = ("near", "far")
    speed: int = 5


class Digs(Common):
    modes: ClassVar[tuple[str, ...]] = ("deep",)
    depth: int = 2


class Traveller(Walks, Digs):
    name: str = ""


OTHERS: Mapping[str, Any] = {
    "decode_graphs": False,
    "exchange": "relay",
    "expert_timeout_s": 3.0,
    "offload": True,
    "share": "1/2",
    "wire_dtype": "int8",
}


def test_a_field_belongs_to_the_modes_that_its_class_names() -> None:
    assert modes_of(Traveller) == {"speed": ("near", "far"), "depth": ("deep",)}
    assert missing_in(Traveller) == {"depth"}
    assert modes_of(Common) == {}


def test_a_setting_of_another_mode_is_refused_unless_it_has_its_default() -> None:
    assert foreign(Traveller(dispatch="far", speed=9)) == ""
    assert foreign(Traveller(dispatch="there", speed=5)) == ""
    assert foreign(Traveller(dispatch="there", speed=9)) == (
        "--speed belongs to --dispatch near and far, got there"
    )


def test_the_help_groups_settings_by_mode_and_leaves_out_those_of_none() -> None:
    groups = {flag.field: flag.group for flag in flags_of(Traveller, {"dispatch": "Ways"})}

    assert groups == {
        "dispatch": "Ways",
        "rows": "Ways",
        "speed": "Ways with --dispatch near and far",
        "name": "Ways",
    }


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("dispatch", ["local", "routed", "gathered", "all-to-all"])
def test_attention_workers_refuse_exactly_the_settings_of_other_modes(
    field: str, dispatch: str
) -> None:
    modes = modes_of(AttentionSettings)[field]
    flag, value = field.replace("_", "-"), OTHERS[field]
    given = {True: f"--{flag}", False: f"--no-{flag}"}.get(value, f"--{flag}={value}")
    flags = ["--model=m", f"--dispatch={dispatch}", "--device=cpu", given]

    if dispatch in modes:
        assert getattr(read_settings(AttentionSettings, flags), field) == value
    else:
        with pytest.raises(
            BadSettings, match=f"^--{flag} belongs to --dispatch .*, got {dispatch}$"
        ):
            read_settings(AttentionSettings, flags)


def test_an_edge_agent_has_no_flags_of_attention_workers_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {flag.field for flag in flags_in(EdgeAgentSettings)}
    assert own & OTHERS.keys() == {"expert_timeout_s", "wire_dtype"}
    monkeypatch.setenv("MOESAIC_STANDBY", "true")

    with pytest.raises(BadSettings, match=r"--standby belongs to --dispatch .*, got collaborative"):
        read_settings(EdgeAgentSettings, ["--model=m"])
