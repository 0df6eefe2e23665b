"""``bench models`` measures every family, everywhere."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.models.cases import FORMATS, OF_FORMATS, PUBLISHED, TOPOLOGIES, Models, cases_of
from benchmarks.parity.configurations import CLASSES
from moesaic.models.configuration.config import load_config


@pytest.mark.parametrize("family", CLASSES)
def test_a_family_is_measured_in_every_topology_and_dtype(family: str) -> None:
    cases = list(cases_of(family, quick=False))
    plain = {(c.topology, c.dtype) for c in cases if c.form == "none"}
    assert {topology for topology, _ in plain} == set(TOPOLOGIES)
    assert {(t, d) for t in ("local", "disaggregated") for d in ("float32", "bfloat16")} <= plain
    assert len({str(case) for case in cases}) == len(cases)
    formats = set(FORMATS) if family == OF_FORMATS else set()
    formats |= {PUBLISHED[family]} if family in PUBLISHED else set()
    assert {case.form for case in cases} == {"none", *formats}
    assert [c.topology for c in cases_of(family, quick=True)] == ["disaggregated"]


def test_the_float_numbers_of_a_plain_model_are_its_own(tmp_path: Path) -> None:
    models = Models("qwen3_moe", tmp_path)
    case = next(cases_of("qwen3_moe", quick=False))

    assert models.of(case) == (models.plain, models.plain)
    assert load_config(models.plain).weight_format is None
    with safe_open(models.plain / "model.safetensors", "pt") as file:
        stored = file.get_tensor("model.norm.weight")
    found = models.reference(models.plain).model.norm.weight
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored.float(), found)
