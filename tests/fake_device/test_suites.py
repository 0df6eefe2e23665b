"""Whole suites whose processes compute on fake devices, as they start on a machine with two GPUs."""

import os
from pathlib import Path

import httpx
import pytest

from tests.suites import ROOT, Suite, running
from tests.system.topologies.test_families import flags_of_family, made
from tests.waiting import HANG_S

EVERYWHERE = Path(__file__).with_name("everywhere")
# Interpreted kernels are warmed up for few rows.
SMALL = ("--max-num-batched-tokens", "16", "--max-num-seqs", "4")
UNCAPTURED = "--no-decode-graphs"  # fake devices capture nothing
TOPOLOGIES = {
    "local": ("--topology", "local", UNCAPTURED),
    "disaggregated": ("--topology", "disaggregated", "--experts", "2", UNCAPTURED),
    "edge": ("--topology", "edge", "--agents", "2"),
}


def tokens(suite: Suite) -> list[int]:
    """Greedy tokens behind a short prompt."""
    body = {
        "model": "tiny",
        "prompt": [301, 302, 303, 304, 305],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{suite.url}/v1/completions", json=body, timeout=HANG_S)
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_are_those_of_a_cpu(topology: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    flags = *flags_of_family("qwen2_moe", tmp_path / "model"), *SMALL
    with running(made(tmp_path / "cpu"), *flags, "--topology", "local") as suite:
        expected = tokens(suite)

    own = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(EVERYWHERE), str(ROOT), *filter(None, [own])])
    flags = *flags, *TOPOLOGIES[topology], "--devices", "cuda:0,cuda:1"
    with running(made(tmp_path / "gpus"), *flags, settings={"PYTHONPATH": path}) as suite:
        found = tokens(suite)

    assert len(found) == 4
    assert found == expected
