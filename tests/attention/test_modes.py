"""The modes of an attention worker."""

from pathlib import Path
from typing import get_args

import pytest

import moesaic
from moesaic.services.attention.modes.table import MODES
from moesaic.services.attention.settings import AttentionSettings
from tests.attention.mode_contract import ModeContract

LIBRARY = Path(moesaic.__file__).parent


def test_every_value_of_dispatch_has_its_line_in_the_table() -> None:
    named = get_args(AttentionSettings.model_fields["dispatch"].annotation)

    assert sorted(MODES) == sorted(named)


@pytest.mark.parametrize("name", sorted(MODES))
def test_no_mode_is_named_outside_the_files_of_modes(name: str) -> None:
    files = [*(LIBRARY / "services" / "attention").glob("*.py")]
    elsewhere = [file.name for file in files if f'"{name}"' in file.read_text()]

    assert elsewhere == []


def test_services_open_their_networks_in_one_place() -> None:
    services = (LIBRARY / "services").resolve()
    files = [*LIBRARY.rglob("*.py"), *services.rglob("*.py")]
    opening = {file.name for file in files if "UcxNetwork(" in file.read_text()}

    assert opening == {"opening.py"}


TOO_LITTLE = ({"expert_memory_bytes": 1}, r"expert.memory.bytes")
NO_SUCH_SHARE = ({"share": "2/2"}, "the first of two")
NO_ROWS_TRAVEL = ({"wire_dtype": "int8"}, "--wire-dtype belongs to --dispatch routed, got")
SHARES = ({"share": "0/2"}, {"share": "1/2"})


class TestLocal(ModeContract):
    dispatch = "local"
    refused = (NO_ROWS_TRAVEL,)


class TestLocalOffload(ModeContract):
    dispatch, hows = "local", ({"offload": True},)
    refused = (TOO_LITTLE, (TOO_LITTLE[0] | {"device": "cuda"}, "for 2 layers in transfer"))


class TestRouted(ModeContract):
    dispatch, hows, placed = "routed", ({"exchange": "direct"},), True
    refused = (
        ({"offload": True}, "--offload belongs to --dispatch local and gathered, got routed"),
    )


class TestTwoPhase(ModeContract):
    """Two workers of a node bring rows together that go to another node."""

    dispatch, hows, placed, listens = "routed", ({"exchange": "reduce"},) * 2, True, True
    refused = (({"deterministic": True}, "--exchange direct"),)


class TestGathered(ModeContract):
    dispatch, hows, listens = "gathered", SHARES, True
    refused = (
        TOO_LITTLE,
        (TOO_LITTLE[0] | {"device": "cuda"}, "for 2 layers in transfer"),
        NO_SUCH_SHARE,
        NO_ROWS_TRAVEL,
    )


class TestGatheredAlone(ModeContract):
    """The only share needs no peers, and comes from a file."""

    dispatch, hows = "gathered", ({"offload": True},)
    refused = (TOO_LITTLE,)


class TestAllToAll(ModeContract):
    dispatch, hows, listens = "all-to-all", SHARES, True
    refused = (
        ({"offload": True}, "--offload belongs to --dispatch local and gathered"),
        ({"device": "cuda"}, "--dispatch all-to-all needs --device cpu"),
        NO_SUCH_SHARE,
        NO_ROWS_TRAVEL,
    )
