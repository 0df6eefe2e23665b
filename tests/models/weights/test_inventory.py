"""Every tensor of a model is read, and a file holds no others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import CASES, CPU, Served, build_reference, local_moe
from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import expert_bytes, load_expert
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.inventory import tensor_names

NORM = "model.norm.weight"
Add = Callable[[dict[str, torch.Tensor]], Path]


class Recording(Checkpoint):
    """Notes what is read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.read_names: set[str] = set()

    def read_into(self, name: str, into: torch.Tensor) -> torch.Tensor:
        self.read_names.add(name)
        return super().read_into(name, into)

    def read_slice_into(self, name: str, *how: Any) -> None:
        self.read_names.add(name)
        super().read_slice_into(name, *how)


def assert_bytes_add_up(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Experts as they are counted, and all else, are all that there is."""
    stored = list_tensors(checkpoint.directory)
    experts = sum(
        expert_bytes(checkpoint, config, layer, expert)
        for layer in config.moe_layers
        for expert in range(config.moe.num_experts)
    )
    rest = checkpoint.nbytes(tensor_names(config, stored, experts=False))
    assert experts + rest == checkpoint.nbytes(stored)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tensors_of_a_model_are_those_that_are_read(
    tmp_path: Path, case: Any, original: bool
) -> None:
    build_reference(case, tmp_path, save_original_format=original)
    config, checkpoint = load_config(tmp_path), Recording(tmp_path)

    Decoder.load(checkpoint, config, torch.float32, CPU)
    local_moe(checkpoint, config, torch.float32)

    stored = list_tensors(tmp_path)
    assert checkpoint.read_names == set(tensor_names(config, stored)) == set(stored)


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_what_is_shown_of_loading_adds_up(tmp_path: Path, family: str) -> None:
    build_reference(next(case for case in CASES if case.family == family), tmp_path)
    config, checkpoint = load_config(tmp_path), Checkpoint(tmp_path)
    assert_bytes_add_up(checkpoint, config)
    first = config.moe_layers[0]
    with checkpoint.progress.expecting(1 << 40):
        load_expert(checkpoint, config, first, 1, torch.float32, CPU)
        look = checkpoint.progress.look()
    assert look is not None
    assert look.done == expert_bytes(checkpoint, config, first, 1) > 0


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """A small model of one file, with more in it."""

    def add(tensors: dict[str, torch.Tensor]) -> Path:
        build_reference(next(c for c in CASES if c.family == "deepseek_v2"), tmp_path)
        path = tmp_path / "model.safetensors"
        save_file(load_file(path) | tensors, path, {"format": "pt"})
        return tmp_path

    return add


def test_tensors_that_nobody_reads_are_refused_and_named(add: Add) -> None:
    directory = add({f"model.layers.{n}.mlp.bias": torch.zeros(2) for n in range(5)})

    with pytest.raises(CheckpointError) as refused:
        Served(directory)

    text = str(refused.value)
    assert "5 tensors are not part of the model" in text
    assert "model.layers.0.mlp.bias, model.layers.1.mlp.bias, model.layers.2.mlp.bias" in text
    assert text.endswith("and 2 more")


def test_a_layer_more_than_the_configuration_says_is_refused(add: Add) -> None:
    directory = add({})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))

    with pytest.raises(CheckpointError, match=r"are not part of.*model\.layers\.2\."):
        Served(directory)


def test_what_a_family_carries_unused_is_passed_over(add: Add) -> None:
    unused = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.3.eh_proj.weight": torch.ones(2, 2),  # predicts one token more
        "model.layers.3.self_attn.o_proj.weight": torch.ones(2, 2),
    }

    Served(add(unused))


def test_a_head_beside_tied_embeddings_must_be_the_same(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.options.get("tie_word_embeddings"))
    build_reference(case, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
    Served(tmp_path)

    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="tie_word_embeddings, but they differ") as refused:
        Served(tmp_path)
    assert refused.value.tensor == "lm_head.weight"


def test_a_tensor_that_the_index_passes_over_is_refused(model_directory: Path) -> None:
    path = model_directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][NORM]
    path.write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match="does not list it here") as refused:
        Checkpoint(model_directory)

    assert refused.value.tensor == NORM


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 1234, -1])
def test_a_weight_that_is_not_finite_is_refused(
    tmp_path: Path, bad: float, stored: torch.dtype, place: int
) -> None:
    weights = torch.randn(40, 50).to(stored)
    weights.view(-1)[place] = bad
    save_file({"good": torch.ones(2), "bad": weights}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)

    checkpoint.read("good", (2,), torch.float32, CPU)
    with pytest.raises(CheckpointError, match="1 of 2000 weights are infinite") as refused:
        checkpoint.read("bad", (40, 50), torch.float32, CPU)
    assert refused.value.tensor == "bad"
    row = place // 50 % 40
    entry = torch.empty(50, dtype=torch.bfloat16)
    checkpoint.read_slice_into("bad", (row + 1) % 40, 40, entry)
    with pytest.raises(CheckpointError, match="1 of 50 weights"):
        checkpoint.read_slice_into("bad", row, 40, entry)


def test_a_weight_that_the_asked_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, 3.4028e38])}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)

    checkpoint.read("a", (2,), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"1 of 2 weights .* as torch.bfloat16"):
        checkpoint.read("a", (2,), torch.bfloat16, CPU)


def test_a_file_that_changes_while_it_is_in_use_is_read_no_more(model_directory: Path) -> None:
    checkpoint = Checkpoint(model_directory)
    stored = list_tensors(model_directory)[NORM]
    other = bytearray(stored.file.read_bytes())
    other[-1] ^= 64
    stored.file.write_bytes(other)

    with pytest.raises(CheckpointError, match="has changed while in use"):
        checkpoint.read(NORM, stored.shape, torch.float32, CPU)


def test_a_file_that_becomes_shorter_while_it_is_read_is_told_alike(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(model_directory)
    stored = list_tensors(model_directory)[NORM]
    read = os.preadv

    def cut_and_read(descriptor: int, *arguments: Any) -> int:
        os.truncate(stored.file, 100)  # opened by now
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    with pytest.raises(CheckpointError, match="has changed while in use"):
        checkpoint.read(NORM, stored.shape, torch.float32, CPU)
