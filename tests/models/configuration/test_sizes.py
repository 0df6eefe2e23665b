"""Bytes by arithmetic against those that are held, for every family."""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.memory.checkpoint import write_checkpoint
from benchmarks.parity.cases import CASES, ParityCase, build_reference
from benchmarks.parity.published import FORMS, publish
from moesaic.experts.loaded import ExpertFiles
from moesaic.kernels.held_bytes import Dtype, Quantization
from moesaic.kernels.packed_matrix import PackedMatrix
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import (
    Numbers,
    WeightBytes,
    kv_bytes,
    numbers_for,
    weight_bytes,
)
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="torch packs nothing")

CPU = torch.device("cpu")
SETTINGS: Any = SimpleNamespace(dtype="float32", quantization="none", device="cpu")
BESIDES = ("bias", "levels")  # no matrix: they are not counted


def matrices_in(held: Any, seen: set[int]) -> Iterator[PackedMatrix]:
    """All matrices that an object holds, each once."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, PackedMatrix):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from matrices_in(item, seen)
    elif isinstance(held, dict):
        for item in held.values():
            yield from matrices_in(item, seen)
    elif type(held).__module__.startswith("moesaic") and not isinstance(held, ModelConfig):
        yield from matrices_in(getattr(held, "__dict__", {}), seen)


def held_by(*things: Any, besides: tuple[str, ...] = BESIDES) -> int:
    """Bytes of matrices, but for the parts ``besides``; memory that two of them share counts once."""
    parts = [
        (part.data_ptr(), part.data_ptr() + part.nbytes)
        for matrix in matrices_in(list(things), set())
        for name, part in matrix.parts.items()
        if name not in besides
    ]
    held = counted = 0
    for begin, end in sorted(parts):
        held += max(0, end - max(begin, counted))
        counted = max(counted, end)
    return held


def without_experts(sizes: WeightBytes) -> int:
    return sum(astuple(sizes)) - sizes.expert


def check_expert(files: ExpertFiles, expected: int) -> None:
    """Of an expert the matrices are as expected; biases, and room for vectors to begin at, are all there is besides."""
    expert = files.layout.view(torch.empty(files.expert_bytes, dtype=torch.uint8))
    assert held_by(expert) == expected
    parts = sum(len(matrix.parts) for matrix in matrices_in(expert, set()))
    assert 0 <= files.expert_bytes - held_by(expert, besides=()) < 64 * parts


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, Checkpoint]:
    directory = tmp_path_factory.mktemp("model")
    build_reference(request.param, directory)
    config = load_config(directory)
    return config, Checkpoint.of_model(directory, config)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")]
)
def test_weights_take_what_was_computed(
    model: tuple[ModelConfig, Checkpoint], dtype: Dtype, quantization: Quantization
) -> None:
    (config, checkpoint), numbers = model, getattr(torch, dtype)
    sizes = weight_bytes(config, Numbers(dtype, quantization))

    decoder = Decoder.load(checkpoint, config, numbers, CPU, quantization)
    gates = load_gates(checkpoint, config, numbers, CPU)
    files = ExpertFiles(checkpoint, config, numbers, CPU, quantization)

    assert held_by(decoder, gates) == without_experts(sizes)
    check_expert(files, sizes.expert)
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
    gates = load_gates(checkpoint, config, torch.float32, CPU)

    assert held_by(decoder, gates) == without_experts(sizes)


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
    assert held_by(decoder, gates) == without_experts(sizes)
    assert sizes.attention > without_experts(sizes) / 2, "it would not be seen"
    check_expert(files, sizes.expert)
