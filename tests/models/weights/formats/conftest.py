"""Small models in each published format, beside models of the numbers that they stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import ParityCase, Served, build_reference, prompt_of
from benchmarks.parity.published import FORMS, Published, publish
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.inventory import tensor_names
from moesaic.native.library import library
from tests.models.weights.test_inventory import assert_bytes_add_up

# Every expert computes every row: which ones are chosen may hang on the last bit.
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96, "num_experts_per_tok": 6},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
        "num_experts_per_tok": 8,
    },
    "qwen3_moe": {"moe_intermediate_size": 160, "num_experts_per_tok": 8},
    "gpt_oss": {"intermediate_size": 32, "num_experts_per_tok": 6},
    "deepseek_v2": {
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def form_of(name: str) -> Published:
    """The form whose name begins so."""
    return next(form for form in FORMS if form.name.startswith(name))


@dataclass(frozen=True)
class Both:
    """A quantised model and its numbers."""

    published: Path
    values: Path

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the quantised model."""
        return load_file(self.published / "model.safetensors")

    @property
    def told(self) -> Any:
        """Its ``quantization_config``."""
        return json.loads((self.published / "config.json").read_text())["quantization_config"]

    def rewrite(self, tensors: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """Replace all tensors of the quantised model, and its ``quantization_config``."""
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, self.published / "model.safetensors", {"format": "pt"})
        path = self.published / "config.json"
        fields = json.loads(path.read_text()) | {"quantization_config": told}
        path.write_text(json.dumps(fields))

    def change(self, **tensors: Any) -> None:
        """Replace tensors of the quantised model; None: remove."""
        held = {name: t for name, t in {**self.tensors, **tensors}.items() if t is not None}
        save_file(held, self.published / "model.safetensors", {"format": "pt"})

    def configure(self, **fields: Any) -> None:
        """Change fields of ``quantization_config``; ``...`` removes."""
        told = {name: v for name, v in {**self.told, **fields}.items() if v is not ...}
        self.rewrite(self.tensors, told)

    def compare(self, least_std: float = 0.5) -> None:
        """Compare logits of the quantised model and of its numbers."""
        expected = logits_of(self.values)
        assert expected.std() > least_std
        assert_close(logits_of(self.published), expected, self.published)

    def compare_whole(self, least_std: float = 0.5) -> None:
        """Compare as ``compare``; every tensor belongs to the model, and is counted."""
        config, stored = load_config(self.published), list_tensors(self.published)
        assert set(tensor_names(config, stored)) == set(stored)
        assert_bytes_add_up(Checkpoint(self.published), config)
        self.compare(least_std)


Make = Callable[[str, str], Both]


def logits_of(directory: Path) -> torch.Tensor:
    return Served(directory).forward([(prompt_of(40, seed=3), 0, list(range(8)))])


@pytest.fixture(scope="session")
def float_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of float models by family, each made once."""
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            case = ParityCase(family, "for formats", {"hidden_size": 64, **OPTIONS[family]})
            build_reference(case, made[family], save_original_format=True)
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
