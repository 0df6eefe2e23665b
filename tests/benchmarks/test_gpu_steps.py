"""The benchmark of captured steps computes the same in both forms, and degrades some; a CPU plays its graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import steps
from benchmarks.gpu.arms import ARMS
from moesaic.models.layers import decode_graphs
from moesaic.models.layers.rope import RotaryEmbedding
from tests.kernels.played_graphs import PlayedGraph, played_graphs
from tests.kernels.ways_of_a_gpu import take_the_ways_of_a_gpu


@pytest.mark.suite  # whole models in the interpreter
def test_eager_and_captured_steps_are_timed_side_by_side(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("graphs are captured here, not played")
    take_the_ways_of_a_gpu(monkeypatch)
    monkeypatch.setattr(RotaryEmbedding, "rotation", RotaryEmbedding.compute)  # as on a GPU
    monkeypatch.setattr(decode_graphs, "compile_kernels", lambda device, compute: None)
    replayed: list[PlayedGraph] = []
    replay = PlayedGraph.replay
    monkeypatch.setattr(
        PlayedGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))
    )
    timed: list[bool] = []

    def clock(work: Callable[[], object]) -> float:
        before = len(replayed)
        work()
        timed.append(len(replayed) > before)
        return 2.0 - timed[-1]

    with played_graphs():
        found = steps.measured(
            tiny_model.directory, torch.device("cpu"), clock, all_rows=(2,), context=5
        )

    assert list(found) == ["exact", "fewer", "united", "segments"]
    # On a CPU segments are functions.
    assert timed == [False, True] * 3 + [False, False]
    for name, by_rows in found.items():
        figures = by_rows["2_rows"]
        assert figures["difference"] < 0.05
        assert figures["gain"] == (1.0 if name == "segments" else 2.0)
        assert figures["degraded_choices"] == figures["degraded_choices_captured"]
        assert (figures["degraded_choices"] > 0) == (name in steps.DEGRADED)


def test_a_session_on_a_gpu_times_steps() -> None:
    assert "steps" in [arm.bench for arm in ARMS]
    assert callable(steps.run)
