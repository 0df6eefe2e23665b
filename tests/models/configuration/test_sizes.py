"""Bytes by arithmetic against those that are held, for every family."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory.checkpoint import write_checkpoint
from benchmarks.parity.cases import CASES, ParityCase, build_reference
from benchmarks.parity.published import FORMS, publish
from moesaic.experts.loaded import ExpertFiles
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import Numbers, kv_bytes, numbers_for, weight_bytes
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
SETTINGS: Any = SimpleNamespace(dtype="float32", quantization="none", device="cpu", keep_head=False)


def tensors_in(held: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object holds, each once."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from tensors_in(item, seen)
    elif isinstance(held, dict):
        for item in held.values():
            yield from tensors_in(item, seen)
    elif type(held).__module__.startswith("moesaic") and not isinstance(held, ModelConfig):
        yield from tensors_in(getattr(held, "__dict__", {}), seen)


def held_by(*things: Any) -> int:
    """Bytes of matrices; vectors, such as norms and biases, are not counted."""
    seen: set[int] = set()
    found = {t.untyped_storage().data_ptr(): t for t in tensors_in(list(things), seen)}
    return sum(t.untyped_storage().nbytes() for t in found.values())


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_take_what_was_computed(
    case: ParityCase, dtype: str, quantization: str, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    config = load_config(tmp_path)
    checkpoint, numbers = Checkpoint.of_model(tmp_path, config), getattr(torch, dtype)
    sizes = weight_bytes(config, Numbers(dtype, quantization))

    decoder = Decoder.load(checkpoint, config, numbers, CPU, quantization)
    gates = load_gates(checkpoint, config, numbers, CPU)
    files = ExpertFiles(checkpoint, config, numbers, CPU, quantization)

    # Vectors are not counted, and panels of these tiny matrices are filled up.
    assert held_by(decoder, gates) == pytest.approx(sizes.without_experts, rel=0.12)
    assert files.expert_bytes == pytest.approx(sizes.expert, rel=0.12)
    cache = decoder.new_kv_cache(3, 16)
    assert cache.nbytes == 3 * 16 * kv_bytes(config, Numbers(dtype, quantization))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_real_vocabulary_takes_what_was_computed(
    tied: bool, quantization: str, tmp_path: Path
) -> None:
    write_checkpoint(
        tmp_path, hidden_size=64, num_hidden_layers=1, num_experts=8, tie_word_embeddings=tied
    )
    config = load_config(tmp_path)
    checkpoint = Checkpoint.of_model(tmp_path, config)
    sizes = weight_bytes(config, Numbers("float32", quantization))

    decoder = Decoder.load(checkpoint, config, torch.float32, CPU, quantization)

    assert held_by(decoder) == pytest.approx(sizes.without_experts, rel=0.01)


def test_attention_of_gpt_oss_is_held_as_numbers_beside_experts_of_codes(tmp_path: Path) -> None:
    options = {"hidden_size": 256, "intermediate_size": 32, "vocab_size": 160, "head_dim": 64}
    build_reference(
        ParityCase("gpt_oss", "mxfp4", options), tmp_path / "float", save_original_format=True
    )
    [form] = [each for each in FORMS if each.name.startswith("mxfp4")]
    publish(tmp_path / "float", tmp_path / "model", tmp_path / "values", form)
    config = load_config(tmp_path / "model")
    checkpoint = Checkpoint.of_model(tmp_path / "model", config)
    numbers = numbers_for(SETTINGS, config)

    decoder = Decoder.load(checkpoint, config, torch.float32, CPU)
    gates = load_gates(checkpoint, config, torch.float32, CPU)
    files = ExpertFiles(checkpoint, config, torch.float32, CPU)

    sizes = weight_bytes(config, numbers)
    assert held_by(decoder, gates) == pytest.approx(sizes.without_experts, rel=0.05)
    assert sizes.attention > sizes.without_experts / 2, "it would not be seen"
    assert files.expert_bytes == pytest.approx(sizes.expert, rel=0.12)
