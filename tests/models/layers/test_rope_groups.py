"""Each field of a rope group has the same effect as in transformers, or it is refused."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.cases import ParityCase, Served, build_reference
from tests.models.layers.test_parity import assert_parity

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "rope_type", "fields"),
    [
        ("deepseek_v3", "linear", {}),
        ("deepseek_v3", "dynamic", {}),
        ("deepseek_v3", "default", {}),
        ("deepseek_v2", "llama3", LLAMA3),
        ("deepseek_v2", "linear", {"attention_factor": 3.0, "beta_fast": 4}),
        ("qwen3_moe", "linear", {"attention_factor": 3.0, "truncate": False}),
    ],
)
def test_a_rope_field_is_used_with_the_same_types_as_in_transformers(
    tmp_path: Path, family: str, rope_type: str, fields: dict[str, Any]
) -> None:
    group = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.3}
    case = ParityCase(family, rope_type, {"rope_parameters": group | fields})
    reference = build_reference(case, tmp_path)

    assert_parity(reference, Served(tmp_path))
