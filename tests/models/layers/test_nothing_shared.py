"""Models without shared experts, for which transformers writes matrices of size 0."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import ParityCase, Served, build_reference
from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from tests.models.layers.test_parity import assert_parity


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deepseek_v2", "n_shared_experts"),
        ("deepseek_v3", "n_shared_experts"),
        ("glm4_moe", "n_shared_experts"),
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("granitemoeshared", "shared_intermediate_size"),
        ("ernie4_5_moe", "moe_num_shared_experts"),
    ],
)
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_without_shared_experts_is_served(
    tmp_path: Path, family: str, field: str, original: bool
) -> None:
    case = ParityCase(family, "nothing shared", {field: 0})
    reference = build_reference(case, tmp_path, save_original_format=original)

    assert_parity(reference, Served(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    left_out = family in ("ernie4_5_moe", "granitemoeshared")
    assert left_out == all(tensor.numel() for tensor in stored.values())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_scales_of_a_matrix_of_size_0_are_ignored_too(tmp_path: Path) -> None:
    build_reference(ParityCase("deepseek_v2", "nothing shared", {"n_shared_experts": 0}), tmp_path)
    path, config = tmp_path / "model.safetensors", load_config(tmp_path)
    stored = load_file(path)
    scale = {"model.layers.1.mlp.shared_experts.up_proj.weight_scale": torch.tensor(1.0)}

    save_file(stored | scale, path)
    Checkpoint.of_model(tmp_path, config)

    save_file(stored | {name.replace("shared_", "other_"): t for name, t in scale.items()}, path)
    with pytest.raises(CheckpointError, match=r"other_experts\.up_proj\.weight_scale"):
        Checkpoint.of_model(tmp_path, config)
