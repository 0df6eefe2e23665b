"""A process with memory for a quarter of the experts serves the whole model, within what was planned."""

from pathlib import Path

import pytest

from benchmarks.streaming import make_model, run_mode


@pytest.mark.slow
def test_memory_stays_within_five_per_cent_of_the_plan(tmp_path: Path) -> None:
    make_model(tmp_path)

    [found] = run_mode(tmp_path, "offload", rows=(16,))

    assert found["planned_bytes"] * 4 == found["resident_bytes"]
    assert found["results"][0]["memory_bytes"] == pytest.approx(found["planned_bytes"], rel=0.05)
