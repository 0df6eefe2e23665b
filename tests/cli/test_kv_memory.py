"""A suite's attention workers share what all weights together leave."""

from dataclasses import replace

import pytest

from moesaic.cli.suite.kv_memory import CHOSEN, PROCESS_BYTES, VARIABLE, kv_environment
from moesaic.cli.suite.processes import SuiteOptions
from moesaic.services.attention.settings import AttentionSettings
from moesaic.settings import ServiceSettings
from moesaic.telemetry import memory
from moesaic.usage.reading import read_settings
from tests.suites import DEMO

FREE = 16 << 30
LOCAL = SuiteOptions(
    topology="local",
    model=str(DEMO),
    attention=1,
    experts=2,
    slots_per_layer=0,
    host="127.0.0.1",
    port=0,
)
NUM_EXPERTS = 32


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: FREE)
    for name in (*CHOSEN, "dtype"):
        monkeypatch.delenv(f"MOESAIC_{name.upper()}", raising=False)


def told(*flags: str) -> ServiceSettings:
    return read_settings(AttentionSettings, ["--model", LOCAL.model, *flags])


def given_to(options: SuiteOptions, *flags: str) -> int:
    return int(kv_environment(options, NUM_EXPERTS, told(*flags))[VARIABLE])


def test_half_of_what_weights_leave_is_for_kv() -> None:
    weights = FREE - PROCESS_BYTES - 2 * given_to(LOCAL)

    # The file has two bytes a number; they take four.
    assert weights == pytest.approx(2 * (DEMO / "model.safetensors").stat().st_size, rel=0.02)


def test_workers_share_it_and_each_has_its_weights() -> None:
    three = given_to(replace(LOCAL, attention=3))
    apart = given_to(replace(LOCAL, topology="disaggregated"))

    assert 3 * three < given_to(LOCAL)
    assert apart == given_to(LOCAL) - PROCESS_BYTES  # half of two processes more, the same weights


def test_more_slots_are_more_weights() -> None:
    options = replace(LOCAL, topology="disaggregated")

    assert given_to(replace(options, slots_per_layer=32)) < given_to(options)


def test_weights_of_two_bytes_leave_more() -> None:
    assert given_to(LOCAL, "--dtype", "bfloat16") > given_to(LOCAL)


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_what_the_user_has_chosen_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, value = "--" + name.replace("_", "-"), "1" if name.endswith("fraction") else "9"
    assert kv_environment(LOCAL, NUM_EXPERTS, told(flag, value)) == {}

    monkeypatch.setenv(f"MOESAIC_{name.upper()}", value)
    assert kv_environment(LOCAL, NUM_EXPERTS, told()) == {}


def test_with_no_memory_left_workers_get_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)

    assert given_to(LOCAL) == 1
