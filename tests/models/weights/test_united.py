"""Files of united experts: read as written, and refused by name where they are damaged or another model's."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import weights_digest
from moesaic.models.weights.united import (
    UnitedExperts,
    UnitedManifest,
    find_united,
    write_united,
)

CPU = torch.device("cpu")
WAY = 3  # of eight experts: the last group has two
Experts = dict[tuple[int, int], tuple[Tensor, Tensor]]


@pytest.fixture
def config(model_directory: Path) -> ModelConfig:
    found = load_config(model_directory)
    digest = weights_digest(Checkpoint(model_directory).files, model_directory)
    return replace(found, weights_digest=digest)


@pytest.fixture
def experts(config: ModelConfig) -> Experts:
    generator = torch.Generator().manual_seed(0)
    size, hidden = config.moe.expert_size, config.hidden_size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        (layer, group): (drawn(2 * size, hidden), drawn(hidden, size))
        for layer in config.moe_layers
        for group in range(3)
    }


@pytest.fixture
def manifest(config: ModelConfig) -> UnitedManifest:
    errors: dict[int, list[float | None]] = {
        layer: [0.25, None, 0.5] for layer in config.moe_layers
    }
    return UnitedManifest(
        way=WAY,
        model_digest=config.weights_digest,
        rows=1000,
        recipe={"steps": 10, "rate": 0.5},
        errors=errors,
        mean_errors=errors,
    )


@pytest.fixture
def written(model_directory: Path, manifest: UnitedManifest, experts: Experts) -> Path:
    return write_united(model_directory, manifest, experts)


def test_a_file_is_read_as_it_was_written(
    written: Path, config: ModelConfig, manifest: UnitedManifest, experts: Experts
) -> None:
    assert written.name == "united-way-3.safetensors"

    [united] = find_united(written.parent, config).values()

    assert msgspec.structs.replace(united.manifest, digests={}) == manifest
    assert united.num_groups == 3
    for (layer, group), (gate_up, down) in experts.items():
        read = united.read(layer, group, torch.bfloat16, CPU)
        assert torch.equal(read.gate_up, gate_up)
        assert torch.equal(read.down, down)
    assert united.read(0, 0, torch.float32, CPU).down.dtype == torch.float32


def test_united_experts_are_no_part_of_the_model(
    model_directory: Path, config: ModelConfig, manifest: UnitedManifest, experts: Experts
) -> None:
    write_united(model_directory, manifest, experts)

    checkpoint = Checkpoint.of_model(model_directory, config)

    assert weights_digest(checkpoint.files, model_directory) == config.weights_digest
    assert "layers.0.united.0.down" not in checkpoint


def test_a_file_for_another_model_is_refused(written: Path, config: ModelConfig) -> None:
    other = replace(config, weights_digest="0" * 32)

    with pytest.raises(CheckpointError, match=r"united-way-3.safetensors: was made of weights"):
        UnitedExperts.open(written, other)


def test_a_file_is_checked_once_the_weights_are_known(written: Path, config: ModelConfig) -> None:
    united = UnitedExperts.open(written, replace(config, weights_digest=""))

    united.require_made_of(config.weights_digest)
    with pytest.raises(CheckpointError, match="was made of weights"):
        united.require_made_of("0" * 32)


def test_a_file_with_the_name_of_another_way_is_refused(written: Path, config: ModelConfig) -> None:
    renamed = written.rename(written.with_name("united-way-4.safetensors"))

    with pytest.raises(CheckpointError, match=r"united-way-4.safetensors: holds way 3"):
        UnitedExperts.open(renamed, config)


def test_a_flipped_bit_is_named(written: Path, config: ModelConfig) -> None:
    content = bytearray(written.read_bytes())
    content[-1] ^= 1
    written.write_bytes(content)
    last = sorted(safe_open(written, "pt").keys())[-1]
    united = UnitedExperts.open(written, config)

    layer, group = map(int, re.findall(r"\d+", last))
    with pytest.raises(CheckpointError, match=rf"tensor {last}: is damaged"):
        united.read(layer, group, torch.float32, CPU)
    united.read(0, 0, torch.float32, CPU)


@pytest.mark.parametrize("kept", [3, 500, -1])
def test_a_shortened_file_is_refused(kept: int, written: Path, config: ModelConfig) -> None:
    written.write_bytes(written.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match=r"united-way-3.safetensors: .*is truncated"):
        UnitedExperts.open(written, config)


def test_a_file_with_one_tensor_twice_is_refused(written: Path, config: ModelConfig) -> None:
    content = written.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    name, entry = next(
        pair for pair in json.loads(content[8:end]).items() if pair[0] != "__metadata__"
    )
    header = content[8:end].rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    written.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])

    with pytest.raises(CheckpointError, match=f"has the key {name} twice"):
        UnitedExperts.open(written, config)


def changed_manifest(**changes: object) -> Callable[[UnitedManifest], UnitedManifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed_manifest(version=2), "has version 2, expected 1"),
        (changed_manifest(way=1), "way: expected 2 to 8, found 1"),
        (changed_manifest(errors={0: []}), r"holds layers \[0\], the model's are \[0, 1, 2\]"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    change: Callable[[UnitedManifest], UnitedManifest],
    problem: str,
    written: Path,
    config: ModelConfig,
    manifest: UnitedManifest,
) -> None:
    told = msgspec.json.encode(change(manifest)).decode()
    save_file(load_file(written), written, metadata={"moesaic": told})

    with pytest.raises(CheckpointError, match=problem):
        UnitedExperts.open(written, config)


def test_a_tensor_that_lacks_is_named(
    written: Path, config: ModelConfig, manifest: UnitedManifest
) -> None:
    tensors = load_file(written)
    del tensors["layers.1.united.2.down"]
    save_file(tensors, written, metadata={"moesaic": msgspec.json.encode(manifest).decode()})

    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.* layers\.1\.united\.2\.down"):
        UnitedExperts.open(written, config)


def test_a_file_without_a_manifest_is_refused(written: Path, config: ModelConfig) -> None:
    save_file({"a": torch.zeros(1)}, written)

    with pytest.raises(CheckpointError, match="is not a file of united experts"):
        UnitedExperts.open(written, config)


def test_a_file_that_cannot_be_written_leaves_nothing(
    model_directory: Path,
    manifest: UnitedManifest,
    experts: Experts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    with pytest.raises(OSError, match="No space"):
        write_united(model_directory, manifest, experts)
    assert not list(model_directory.glob("united*"))


def test_the_demo_models_files_are_its_own() -> None:
    demo = Path(__file__).parents[3] / "models" / "demo"
    config = load_config(demo)

    found = find_united(demo, config)

    digest = weights_digest(Checkpoint.of_model(demo, config).files)
    assert list(found) == [2, 4, 8]
    for united in found.values():
        united.require_made_of(digest)
        united.read(config.num_layers - 1, united.num_groups - 1, torch.float32, CPU)
