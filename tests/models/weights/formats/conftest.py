"""Small models in each published format, beside models of the numbers that they stand for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import ParityCase, build_reference
from benchmarks.parity.published import FORMS, Published, publish
from moesaic.models.configuration.config import load_config
from moesaic.native.library import library

# Every expert computes every row: which ones are chosen may hang on the last bit.
MODELS = {
    "mixtral": ParityCase(
        "mixtral",
        "for formats",
        {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 6},
    ),
    "qwen2_moe": ParityCase(
        "qwen2_moe",
        "for formats",
        {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [0],
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_moe": ParityCase(
        "qwen3_moe",
        "for formats",
        {"hidden_size": 64, "moe_intermediate_size": 160, "num_experts_per_tok": 8},
    ),
    "gpt_oss": ParityCase(
        "gpt_oss",
        "for formats",
        {"hidden_size": 64, "intermediate_size": 32, "num_experts_per_tok": 6},
    ),
    "deepseek_v2": ParityCase(
        "deepseek_v2",
        "for formats",
        {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}


def form_of(name: str) -> Published:
    """The form whose name begins so."""
    return next(form for form in FORMS if form.name.startswith(name))


@dataclass(frozen=True)
class Both:
    """A quantised model and its numbers."""

    published: Path
    values: Path

    def change(self, **tensors: Any) -> None:
        """Replace tensors of the quantised model; None: remove."""
        path = self.published / "model.safetensors"
        held = {**load_file(path), **tensors}
        save_file({name: t for name, t in held.items() if t is not None}, path, {"format": "pt"})

    def configure(self, **fields: Any) -> None:
        """Change fields of ``quantization_config``; ``...`` removes."""
        path = self.published / "config.json"
        config = json.loads(path.read_text())
        told = {**config["quantization_config"], **fields}
        config["quantization_config"] = {k: v for k, v in told.items() if v is not ...}
        path.write_text(json.dumps(config))


@pytest.fixture(scope="session")
def float_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of float models by family, each made once."""
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            build_reference(MODELS[family], made[family], save_original_format=True)
        return made[family]

    return model


@pytest.fixture
def make(tmp_path: Path, float_models: Callable[[str], Path]) -> Callable[[str, str], Both]:
    """Publish the model of a family in a form."""

    def make(family: str, form: str) -> Both:
        both = Both(tmp_path / "published", tmp_path / "values")
        publish(float_models(family), both.published, both.values, form_of(form))
        return both

    return make


def some(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy whose last entry is another."""
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


def assert_close(found: torch.Tensor, expected: torch.Tensor, published: Path) -> None:
    """Compare logits ``[T, vocab]``: rows are rounded to bytes beside int4, and beside nothing else."""
    form = load_config(published).weight_format
    assert form is not None
    if form.held is not None and form.held.kind == "int4" and library():
        error = (found - expected).std(dim=1) / expected.std()
        assert 0 < error.median() < 0.04
        assert error.max() < 0.12
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
