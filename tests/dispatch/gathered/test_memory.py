"""Processes that hold a part of the experts serve the whole model, within the memory that was planned."""

from pathlib import Path

import pytest

from benchmarks.prefill.gathered import make_model, run_mode


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offload", "gathered", "gathered+offload"])
def test_memory_stays_within_five_per_cent_of_the_plan(tmp_path: Path, mode: str) -> None:
    make_model(tmp_path)

    [found] = run_mode(tmp_path, mode, rows=(16,))

    if mode == "offload":
        assert found["planned_bytes"] * 4 == found["resident_bytes"]
    assert found["results"][0]["memory_bytes"] == pytest.approx(found["planned_bytes"], rel=0.05)
