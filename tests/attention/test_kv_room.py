"""KV is sized from memory: within what is there, enough to work, and no more than is likely to be used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.blocks import blocks_for
from moesaic.models.configuration.captured import captured_bytes
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.sizes import kv_bytes, numbers_for
from moesaic.prefix.blocks import BLOCK_SIZE
from moesaic.services.attention import kv_room
from moesaic.services.attention.kv_room import LEAST_BLOCKS, USUAL_BLOCKS, blocks_within
from moesaic.services.attention.settings import AttentionSettings
from moesaic.telemetry import memory
from moesaic.transport.device_memory import MemoryOf
from moesaic.usage.reading import load_settings

GIB = 1 << 30


def test_a_model_of_40k_positions_holds_whole_contexts_where_memory_allows() -> None:
    block_bytes = 16 * 48 * 1024 * 4  # 48 layers of 8 heads of 64, in float32

    assert blocks_within(64 * GIB, block_bytes, 40_960) == 8 * blocks_for(40_960)
    assert blocks_within(8 * GIB, block_bytes, 40_960) * BLOCK_SIZE >= 40_960


def test_a_small_model_takes_what_it_took_before() -> None:
    assert blocks_within(64 * GIB, 1 << 16, 2048) == USUAL_BLOCKS


@given(st.integers(0, 1 << 45), st.integers(1, 1 << 30), st.integers(1, 1 << 22))
def test_blocks_stay_within_memory_and_bounds(memory_bytes, block_bytes, max_positions) -> None:
    blocks = blocks_within(memory_bytes, block_bytes, max_positions)

    assert blocks >= LEAST_BLOCKS
    assert blocks == LEAST_BLOCKS or blocks * block_bytes <= memory_bytes
    assert blocks <= max(USUAL_BLOCKS, 8 * blocks_for(max_positions))


@pytest.mark.parametrize(("given", "taken"), [("0", True), ("7", False), ("8", True)])
def test_so_few_blocks_that_nothing_runs_are_refused(given: str, taken: bool) -> None:
    flags = ["--model", "m", "--kv-blocks", given]
    if taken:
        assert load_settings(AttentionSettings, flags).kv_blocks == int(given)
        return
    with pytest.raises(SystemExit):
        load_settings(AttentionSettings, flags)


def group(directory: Path, limit: str, used: int, cached: int, *, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1,000 KiB to give, and no group yet."""
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    (tmp_path / "own").write_text("1:cpu:/\n0::/outer/inner\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def test_the_machine_counts_where_no_group_has_a_limit(machine: Path) -> None:
    group(machine / "groups/outer/inner", "max", 5, 0)

    assert memory.free_bytes() == 1000 * 1024


def test_the_tightest_group_counts_with_what_it_can_reclaim(machine: Path) -> None:
    group(machine / "groups/outer", "50000", 40_000, 15_000)
    group(machine / "groups/outer/inner", "90000", 1000, 0)

    assert memory.free_bytes() == 50_000 - (40_000 - 15_000)


def test_the_first_version_of_groups_is_read_too(machine: Path) -> None:
    (machine / "own").write_text("4:memory:/a/b\n0::/\n")
    group(machine / "groups/memory/a", "70000", 10_000, 0, version=1)

    assert memory.free_bytes() == 60_000


def test_a_group_that_is_over_its_limit_has_nothing_left(machine: Path) -> None:
    group(machine / "groups", "1000", 5000, 0)

    assert memory.free_bytes() == 0


def test_this_machine_says_what_it_has() -> None:
    assert memory.free_bytes() > 1 << 20


def test_kv_leaves_the_memory_of_captured_steps(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    config = replace(load_config(tiny_model.directory), max_positions=1 << 20)
    form: dict[str, Any] = {"model": "m", "device": "cuda", "dtype": "bfloat16"}
    monkeypatch.setattr(kv_room, "memory_of", lambda _: MemoryOf(GIB, GIB))

    with_graphs, without = (
        kv_room.kv_blocks_of(
            AttentionSettings(**form, kv_memory_fraction=1.0, decode_graphs=on), config
        )
        for on in (True, False)
    )

    numbers = numbers_for(AttentionSettings(**form), config)
    block_bytes = BLOCK_SIZE * kv_bytes(config, numbers)
    kept = captured_bytes(config, numbers, 64, 1 << 20)
    assert kept > block_bytes
    assert (without - with_graphs) * block_bytes == pytest.approx(kept, abs=block_bytes)
