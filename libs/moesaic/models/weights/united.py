"""United experts in files, one for each way, beside the model that they stand in for.

``united-way-4.safetensors`` holds ``layers.L.united.J.gate_up`` and ``.down`` for every sparse layer and
group; its metadata say of which weights they were made and how far they are off. Written by ``moesaic distill``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.messages.rung import Rung
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.experts import ExpertWeights

_NAME = re.compile(r"united-way-(\d+)\.safetensors")
VERSION = 1


class UnitedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a file.

    Attributes:
        version: of this format.
        way: experts of one group.
        model_digest: of the weights that they were made of.
        errors: held-out squared error over squared length, by sparse layer and group.
        rows: tokens that they were trained on.
    """

    version: int = VERSION
    way: int
    model_digest: str
    errors: dict[int, list[float]]
    rows: int


@dataclass(frozen=True)
class UnitedExperts:
    """One file; opening it reads its header."""

    path: Path
    manifest: UnitedManifest

    @classmethod
    def open(cls, path: Path, config: ModelConfig) -> "UnitedExperts":
        """Check that a file is whole, and fits the model.

        Raises:
            CheckpointError: it does not, or is damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                names, metadata = set(file.keys()), file.metadata() or {}
            manifest = msgspec.json.decode(metadata.get("moesaic", "{}"), type=UnitedManifest)
        except (OSError, SafetensorError, msgspec.DecodeError) as error:
            raise CheckpointError(path.name, f"is no file of united experts: {error}") from error
        if manifest.version != VERSION:
            raise CheckpointError(
                path.name, f"has version {manifest.version}; this side reads {VERSION}"
            )
        groups = Rung(way=manifest.way).num_united(config.moe.num_experts)
        for layer in config.moe_layers:
            if len(manifest.errors.get(layer, ())) != groups:
                raise CheckpointError(path.name, f"layer {layer} has not {groups} groups")
            for group in range(groups):
                for part in ("gate_up", "down"):
                    if _tensor(layer, group, part) not in names:
                        raise CheckpointError(
                            path.name, "is missing", tensor=_tensor(layer, group, part)
                        )
        return cls(path, manifest)

    def read(
        self, config: ModelConfig, layer: int, group: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """Read one united expert.

        Raises:
            CheckpointError: a tensor cannot be read, or has another shape.
        """
        size, hidden = config.moe.expert_size, config.hidden_size
        shapes = {"gate_up": (2 * size, hidden), "down": (hidden, size)}
        found = {}
        try:
            with safe_open(self.path, "pt") as file:
                for part, shape in shapes.items():
                    tensor = file.get_tensor(_tensor(layer, group, part))
                    if tensor.shape != shape:
                        problem = f"expected shape {list(shape)}, found {list(tensor.shape)}"
                        raise CheckpointError(
                            self.path.name, problem, tensor=_tensor(layer, group, part)
                        )
                    found[part] = tensor.to(device=device, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(self.path.name, f"cannot be read: {error}") from error
        return ExpertWeights(**found)


def find_united(directory: Path, config: ModelConfig) -> dict[int, UnitedExperts]:
    """Open all files of united experts in a directory, by way.

    Raises:
        CheckpointError: see ``UnitedExperts.open``.
    """
    found = {}
    for path in sorted(directory.glob("united-way-*.safetensors")):
        if _NAME.fullmatch(path.name):
            united = UnitedExperts.open(path, config)
            found[united.manifest.way] = united
    return found


def write_united(
    directory: Path, manifest: UnitedManifest, experts: dict[tuple[int, int], tuple[Tensor, Tensor]]
) -> Path:
    """Write a file, whole or not at all.

    Args:
        directory: where to.
        manifest: says what it holds.
        experts: ``gate_up`` and ``down`` by layer and group.
    """
    tensors = {
        _tensor(layer, group, part): tensor.contiguous()
        for (layer, group), both in experts.items()
        for part, tensor in zip(("gate_up", "down"), both, strict=True)
    }
    path = directory / f"united-way-{manifest.way}.safetensors"
    fresh = path.with_suffix(".new")
    told = {"moesaic": msgspec.json.encode(manifest).decode(), "format": "pt"}
    save_file(tensors, fresh, metadata=told)
    fresh.replace(path)
    return path


def _tensor(layer: int, group: int, part: str) -> str:
    return f"layers.{layer}.united.{group}.{part}"
