"""Unfinished work of a distillation: a directory beside its results, so that a stopped run goes on there.

Everything that a part depends on is in its name: the weights, the rows and the recipe.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from moesaic.errors import InvalidInput
from moesaic.models.weights.header import read_header
from moesaic.models.weights.library import read_tensors
from moesaic_lab.distillation.group import UnitedExpert
from moesaic_lab.distillation.recipe import Recipe

VERSION = 2  # of what a part holds, and of how it is made


class _Errors(msgspec.Struct, frozen=True):
    errors: list[float | None]
    mean_errors: list[float | None]


@dataclass(frozen=True)
class DistilledParts:
    """The parts over the same rows and weights, in a directory of their own."""

    directory: Path
    recipe: Recipe

    @classmethod
    @contextmanager
    def claimed(
        cls, out: Path, model_digest: str, rows_digest: str, recipe: Recipe
    ) -> Iterator["DistilledParts"]:
        """Open the directory for the length of the block.

        Raises:
            InvalidInput: it cannot be written to, or another run is at it.
        """
        directory = out / f".united-{_digest_of(VERSION, model_digest, rows_digest)}.partial"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY)
            (directory / "begun").touch()
        except OSError as error:
            raise InvalidInput("--out", f"{out} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield cls(directory, recipe)
        except BlockingIOError as error:
            raise InvalidInput("--out", f"{directory} is in use by another run") from error
        finally:
            os.close(descriptor)

    def whole(self, way: int, start: Mapping[str, str]) -> Path:
        """Name the file of what the whole model taught the experts of a way.

        Args:
            way: experts of one group.
            start: digests of the experts that it began with; none: those of this directory.
        """
        made_by = _digest_of(self.recipe, start)
        return self.directory / f"way-{way}-whole-{made_by}.safetensors"

    def has(self, layer: int, way: int) -> bool:
        """Tell whether the experts of one layer are there."""
        return self._path(layer, way).exists()

    def read(self, layer: int, way: int) -> list[UnitedExpert]:
        """Read the experts of one layer, which are there; raises ``CheckpointError`` if they are damaged."""
        path = self._path(layer, way)
        told = msgspec.json.decode(read_header(path).metadata["told"], type=_Errors)
        tensors = read_tensors(path)
        return [
            UnitedExpert(tensors[f"{i}.gate_up"], tensors[f"{i}.down"], *errors)
            for i, errors in enumerate(zip(told.errors, told.mean_errors, strict=True))
        ]

    def write(self, layer: int, way: int, made: Sequence[UnitedExpert]) -> None:
        """Keep the experts of one layer; they appear all or none."""
        tensors: dict[str, torch.Tensor] = {}
        for i, one in enumerate(made):
            tensors |= {f"{i}.gate_up": one.gate_up, f"{i}.down": one.down}
        told = _Errors([one.error for one in made], [one.mean_error for one in made])
        path = self._path(layer, way)
        fresh = path.with_suffix(".new")
        save_file(tensors, fresh, metadata={"told": msgspec.json.encode(told).decode()})
        fresh.replace(path)

    def remove(self, ways: Iterable[int]) -> None:
        """Remove the parts of some ways, once their files are written; those of other ways may be gone on with."""
        for way in ways:
            for path in self.directory.glob(f"way-{way}-*"):
                path.unlink()
        if not any(self.directory.glob("way-*")):
            shutil.rmtree(self.directory)

    def _path(self, layer: int, way: int) -> Path:
        own = self.recipe
        made_by = _digest_of(own.steps, own.batch, own.rate, own.seed)
        return self.directory / f"way-{way}-layer-{layer}-{made_by}.safetensors"


def _digest_of(*values: object) -> str:
    return sha256(msgspec.json.encode(values)).hexdigest()[:16]
