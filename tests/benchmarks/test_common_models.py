"""Random models of benchmarks are loaded as any model is, be they of one file or of shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common import models
from benchmarks.common.models import DEEPSEEK_V2, qwen3_moe, tensor_shapes, write_model
from moesaic.dispatch.local import LocalDispatcher
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint

CPU, FP32 = torch.device("cpu"), torch.float32
GROUPED = qwen3_moe(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
LATENT = {
    **DEEPSEEK_V2,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 16,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_model_is_loaded_whole(config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    write_model(tmp_path, {**config, "tie_word_embeddings": tied})

    served = load_config(tmp_path)
    checkpoint = Checkpoint.of_model(tmp_path, served)

    Decoder.load(checkpoint, served, FP32, CPU)
    LocalDispatcher(checkpoint, served, FP32, CPU)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("at_least", [1, 20_000, 10**9])
def test_shards_hold_each_tensor_once(
    at_least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SHARD_BYTES", at_least)
    write_model(tmp_path, GROUPED, "float32")

    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]

    assert all(files)
    found = [(name, tuple(tensor.shape)) for file in files for name, tensor in file.items()]
    assert sorted(found) == sorted(tensor_shapes(GROUPED))
    Checkpoint.of_model(tmp_path, load_config(tmp_path))


def test_attention_may_be_written_alone(tmp_path: Path) -> None:
    write_model(tmp_path, LATENT, with_experts=False)

    Decoder.load(Checkpoint(tmp_path), load_config(tmp_path), FP32, CPU)
    names = load_file(tmp_path / "model.safetensors")
    assert not [name for name in names if ".experts." in name or ".gate." in name]
