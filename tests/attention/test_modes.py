"""The modes of an attention worker."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import moesaic
from moesaic.errors import InvalidInput
from moesaic.models.configuration.config import load_config
from moesaic.services.attention.modes import MODES
from moesaic.services.attention.settings import AttentionSettings

LIBRARY = Path(moesaic.__file__).parent


def test_every_value_of_dispatch_has_its_line_in_the_table() -> None:
    named = get_args(AttentionSettings.model_fields["dispatch"].annotation)

    assert sorted(MODES) == sorted(AttentionSettings.dispatches)
    assert set(named) - set(MODES) == {"collaborative"}  # an edge agent's


@pytest.mark.parametrize("name", sorted(MODES))
def test_no_mode_is_named_outside_the_files_of_modes(name: str) -> None:
    files = [*(LIBRARY / "services" / "attention").glob("*.py")]
    elsewhere = [file.name for file in files if f'"{name}"' in file.read_text()]

    assert elsewhere == ["settings.py"]


@pytest.mark.parametrize(
    ("dispatch", "more"),
    [
        ("local", {"offload": True}),
        ("gathered", {"share": "0/2"}),
        ("gathered", {"share": "0/1", "offload": True}),
        ("routed", {"offload": True}),
    ],
)
def test_experts_that_need_more_memory_than_was_given_are_refused_before_a_worker_is_opened(
    tiny_model: Any, dispatch: str, more: dict[str, Any]
) -> None:
    config = load_config(tiny_model.directory)
    given = {"model": str(tiny_model.directory), "dispatch": dispatch, **more}
    enough = AttentionSettings(**given)
    too_little = AttentionSettings(**given, expert_memory_bytes=1)

    with torch.inference_mode():
        assert callable(MODES[dispatch](enough, config))
        with pytest.raises(InvalidInput, match=r"expert.memory.bytes"):
            MODES[dispatch](too_little, config)


def test_services_open_their_networks_in_one_place() -> None:
    services = (LIBRARY / "services").resolve()
    files = [*LIBRARY.rglob("*.py"), *services.rglob("*.py")]
    opening = {file.name for file in files if "UcxNetwork(" in file.read_text()}

    assert opening == {"opening.py"}
