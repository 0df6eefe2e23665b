"""United experts in files, one for each way, beside the model that they stand in for.

``united-way-4.safetensors`` holds ``layers.L.united.J.gate_up`` and ``.down`` for every sparse layer and group of
four experts (BrownoutServe section IV-B). Its metadata say of which weights they were made, what each tensor's bytes
are, and how far they are off. ``moesaic distill`` writes it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.experts import ExpertWeights
from moesaic.models.weights.header import read_header
from moesaic.models.weights.library import read_tensors

VERSION = 1
_NAME = re.compile(r"united-way-(\d+)\.safetensors")
_PARTS = ("gate_up", "down")


class UnitedQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions of held-out next tokens, when united experts serve every choice.

    Attributes:
        exact: cross-entropy of the exact model, in nats per token.
        united: the same with united experts only.
        agreement: share of rows whose most likely token is the same in both.
    """

    exact: float
    united: float
    agreement: float


class UnitedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a file.

    Attributes:
        version: version of the format.
        way: experts of one group; the last group may have fewer.
        model_digest: ``weights_digest`` of the model.
        rows: tokens that they were trained on.
        recipe: the recipe of training.
        errors: relative squared error on held-out rows, by sparse layer and group: of the united
            expert, against the sum of its group's experts. None: the gate sends no rows to the
            group.
        mean_errors: the same for the mean of the group's weights, which needs no training.
        quality: quality of the whole model; None: not measured.
        digests: XXH3 (64 bits, hex) of each tensor's bytes.
    """

    version: int = VERSION
    way: int
    model_digest: str
    rows: int
    recipe: dict[str, int | float]
    errors: dict[int, list[float | None]]
    mean_errors: dict[int, list[float | None]]
    quality: UnitedQuality | None = None
    digests: dict[str, str] = {}


@dataclass(frozen=True)
class UnitedExperts:
    """One file; opening it reads its header alone."""

    path: Path
    manifest: UnitedManifest
    config: ModelConfig

    @classmethod
    def open(cls, path: Path, config: ModelConfig) -> "UnitedExperts":
        """Check that a file holds everything that it should, for this model.

        Raises:
            CheckpointError: it does not, is damaged, or has the name of another way; or was made of other weights than
                ``config.weights_digest`` says, where that is known.
        """
        try:
            header = read_header(path)
            told = header.metadata.get("moesaic", "{}")
            manifest = msgspec.json.decode(told, type=UnitedManifest)
        except msgspec.DecodeError as error:
            raise CheckpointError(path.name, f"is not a file of united experts: {error}") from error
        united = cls(path, manifest, config)
        if problem := united._problem(set(header.tensors)):
            raise CheckpointError(path.name, problem)
        if config.weights_digest:
            united.require_made_of(config.weights_digest)
        return united

    def require_made_of(self, model_digest: str) -> None:
        """Refuse a file for another model; raises ``CheckpointError``."""
        if self.manifest.model_digest != model_digest:
            raise CheckpointError(
                self.path.name,
                f"was made of weights {self.manifest.model_digest}, these are {model_digest}: make it anew "
                "with moesaic distill",
            )

    @property
    def digest(self) -> str:
        """64 bits over all that workers compute by, in hex: the tensors."""
        told = msgspec.json.encode(sorted(self.manifest.digests.items()))
        return xxhash.xxh3_64_hexdigest(told)

    @property
    def num_groups(self) -> int:
        """Number of united experts of a layer."""
        return Substitution(way=self.manifest.way).num_united(self.config.moe.num_experts)

    def read(
        self, layer: int, group: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """Read one united expert.

        Raises:
            CheckpointError: a tensor cannot be read, has another shape, or other bytes than were written.
        """
        size, hidden = self.config.moe.expert_size, self.config.hidden_size
        gate_up, down = (
            self._read(tensor_name(layer, group, part), shape).to(device=device, dtype=dtype)
            for part, shape in zip(_PARTS, ((2 * size, hidden), (hidden, size)), strict=True)
        )
        return ExpertWeights(gate_up, down)

    def _read(self, name: str, shape: tuple[int, int]) -> Tensor:
        file_name = self.path.name
        tensor = read_tensors(self.path, [name])[name]
        if tensor.shape != shape:
            problem = f"expected shape {list(shape)}, found {list(tensor.shape)}"
            raise CheckpointError(file_name, problem, tensor=name)
        if _digest_of(tensor) != self.manifest.digests.get(name):
            raise CheckpointError(file_name, "is damaged: its bytes have changed", tensor=name)
        return tensor

    def _problem(self, names: set[str]) -> str:
        """Say what is wrong with a file that has tensors of these names; empty: nothing."""
        manifest, name = self.manifest, _NAME.fullmatch(self.path.name)
        if self.config.moe.expert_bias:
            return "has no biases, but this model's experts do: leave it out"
        if manifest.version != VERSION:
            return f"has version {manifest.version}, expected {VERSION}"
        if not 2 <= manifest.way <= self.config.moe.num_experts:
            return f"way: expected 2 to {self.config.moe.num_experts}, found {manifest.way}"
        if name is None or int(name[1]) != manifest.way:
            return f"holds way {manifest.way}: its name should be {file_name(manifest.way)}"
        if set(manifest.errors) != set(self.config.moe_layers):
            return f"holds layers {sorted(manifest.errors)}, the model's are {list(self.config.moe_layers)}"
        missing = [
            wanted
            for layer in self.config.moe_layers
            for group in range(self.num_groups)
            for part in _PARTS
            if (wanted := tensor_name(layer, group, part)) not in names
        ]
        return f"lacks {len(missing)} tensors, the first is {missing[0]}" if missing else ""


def file_name(way: int) -> str:
    """Name the file of a way."""
    return f"united-way-{way}.safetensors"


def tensor_name(layer: int, group: int, part: str) -> str:
    """Name the tensor ``part``, ``gate_up`` or ``down``, of one united expert."""
    return f"layers.{layer}.united.{group}.{part}"


def find_united(directory: Path, config: ModelConfig) -> dict[int, UnitedExperts]:
    """Open all files of united experts in a directory, by way.

    Raises:
        CheckpointError: see ``UnitedExperts.open``.
    """
    paths = sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    opened = (UnitedExperts.open(path, config) for path in paths)
    return {united.manifest.way: united for united in sorted(opened, key=lambda u: u.manifest.way)}


def write_united(
    directory: Path,
    manifest: UnitedManifest,
    experts: Mapping[tuple[int, int], tuple[Tensor, Tensor]],
) -> Path:
    """Write a file, whole or not at all.

    Args:
        directory: directory for the file; its name follows from ``manifest.way``.
        manifest: the metadata; this function fills in the digests.
        experts: ``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]`` by layer and group, as they are stored.

    Returns:
        Its path.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {
        tensor_name(layer, group, part): tensor.contiguous()
        for (layer, group), both in sorted(experts.items())
        for part, tensor in zip(_PARTS, both, strict=True)
    }
    digests = {name: _digest_of(tensor) for name, tensor in tensors.items()}
    told = msgspec.json.encode(msgspec.structs.replace(manifest, digests=digests)).decode()
    path = directory / file_name(manifest.way)
    fresh = path.with_suffix(".new")
    try:
        save_file(tensors, fresh, metadata={"moesaic": told})
        # Services may run as another user.
        fresh.chmod(0o644)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _digest_of(tensor: Tensor) -> str:
    payload = tensor.contiguous().view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(payload)  # type: ignore[arg-type]  # numpy's stubs hide the buffer
