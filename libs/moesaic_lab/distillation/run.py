"""Distillation of all united experts of a model: layer by layer, then as a whole."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.united import (
    UnitedExperts,
    UnitedManifest,
    UnitedQuality,
    find_united,
    write_united,
)
from moesaic_lab.distillation import joint
from moesaic_lab.distillation.frozen import Both, FrozenWeights
from moesaic_lab.distillation.group import Group, UnitedExpert, distil
from moesaic_lab.distillation.network import Degraded, TrainableModel
from moesaic_lab.distillation.parts import DistilledParts
from moesaic_lab.distillation.recipe import DistillProgress, Recipe
from moesaic_lab.distillation.states import LayerByLayer, RoutedRows
from moesaic_lab.distillation.texts import LearningSequence, LearningText

_CPU = torch.device("cpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Errors = dict[int, list[float | None]]
"""Relative errors of united experts, by layer and group."""


class Distillation:
    """United experts of one model, for some ways."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        text: LearningText,
        recipe: Recipe,
        ways: Sequence[int],
        tell: Callable[[DistillProgress], None] = lambda progress: None,
        start: Path | None = None,
    ) -> None:
        """Distil on the CPU in float32, and store what comes of it in the model's dtype.

        Args:
            checkpoint: of the model.
            config: of the model, with the digest of its weights.
            text: to learn from.
            recipe: of training.
            ways: experts of one group, for each file.
            tell: is told of progress.
            start: directory of united experts to begin with, which are not learned layer by layer then.

        Raises:
            InvalidInput: ``start`` lacks a way, or the model's experts cannot be united so.
            CheckpointError: a file of ``start`` is damaged, or for other weights.
        """
        assert config.weights_digest
        if config.moe.expert_bias or config.moe.activation is not None:
            raise InvalidInput(
                "--model",
                f"experts of family {config.family} have biases and an activation other than SwiGLU, which united "
                "experts are not distilled with: the means of groups serve instead",
            )
        self._checkpoint, self._config, self._text = checkpoint, config, text
        self._recipe, self._ways, self._tell = recipe, sorted(set(ways)), tell
        self._dtype = _DTYPES[config.dtype]
        self._start = None if start is None else _opened(start, config, self._ways)

    def run(self, out: Path) -> list[UnitedManifest]:
        """Distil what is not done yet, and write a file for each way.

        Args:
            out: directory of the files; unfinished work is in it as well.

        Returns:
            What the files say of themselves, by ascending way.

        Raises:
            InvalidInput: ``out`` cannot be used, or the whole model cannot be trained.
            CheckpointError: a tensor of the model is damaged or missing.
        """
        network = None
        if self._recipe.joint_steps:
            network = TrainableModel(FrozenWeights.load(self._checkpoint, self._config))
        digests = self._config.weights_digest, self._text.digest
        with DistilledParts.claimed(out, *digests, self._recipe) as parts:
            if self._start is None:
                self._learn_layers(parts)
            # One way after the other: of a large model, memory holds one of them.
            manifests = [self._write(way, network, parts, out) for way in self._ways]
            parts.remove(self._ways)
        return manifests

    def _write(
        self, way: int, network: TrainableModel | None, parts: DistilledParts, out: Path
    ) -> UnitedManifest:
        """Write the file of a way; before, its experts learn together where there is a ``network``."""
        made = self._begun(way, parts)
        recipe = msgspec.to_builtins(self._recipe)
        manifest = UnitedManifest(
            way=way,
            model_digest=self._config.weights_digest,
            rows=sum(map(len, self._text.train)),
            recipe={name: value for name, value in recipe.items() if value is not None},
            errors={layer: [one.error for one in own] for layer, own in made.items()},
            mean_errors={layer: [one.mean_error for one in own] for layer, own in made.items()},
        )
        united = {
            (layer, group): (one.gate_up, one.down)
            for layer, own in made.items()
            for group, one in enumerate(own)
        }
        if network is not None:
            stacked, quality = self._learn_together(network, way, made, parts)
            errors = self._measured(way, stacked, parts.directory)
            manifest = msgspec.structs.replace(manifest, errors=errors, quality=quality)
            united = self._by_group(stacked)
        write_united(out, manifest, united)
        return manifest

    def _begun(self, way: int, parts: DistilledParts) -> dict[int, list[UnitedExpert]]:
        """Find the experts of a way before they learn together."""
        layers = self._config.moe_layers
        if self._start is None:
            return {layer: parts.read(layer, way) for layer in layers}
        begun, told = self._start[way], self._start[way].manifest

        def one(layer: int, group: int) -> UnitedExpert:
            weights = begun.read(layer, group, self._dtype, _CPU)
            errors = told.errors[layer][group], told.mean_errors[layer][group]
            return UnitedExpert(*weights.numbers(self._dtype), *errors)

        return {layer: [one(layer, group) for group in range(begun.num_groups)] for layer in layers}

    def _learn_layers(self, parts: DistilledParts) -> None:
        """Train every united expert on the rows of its layer."""
        layers, groups = self._config.moe_layers, {way: self._num_groups(way) for way in self._ways}
        total, done = len(layers) * sum(groups.values()), 0
        if all(parts.has(layer, way) for layer in layers for way in self._ways):
            return
        passing = self._passing([*self._text.train, *self._text.held_out], parts.directory)
        num_train = sum(map(len, self._text.train))
        for layer in range(self._config.num_layers):
            rows = passing.pass_layer(layer)
            if rows is None:
                continue
            for way in self._ways:
                if parts.has(layer, way):
                    done += groups[way]
                    continue
                made = []
                for group in range(groups[way]):
                    train, held_out = self._groups(layer, way, group, rows, num_train)
                    seed = random.Random(f"{self._recipe.seed} {layer} {way} {group}").getrandbits(
                        63
                    )
                    made.append(distil(train, held_out, self._recipe, seed, self._dtype))
                    done += 1
                    note = f"layer {layer}, way {way}"
                    self._tell(DistillProgress("united experts", done, total, note))
                parts.write(layer, way, made)

    def _learn_together(
        self,
        network: TrainableModel,
        way: int,
        made: dict[int, list[UnitedExpert]],
        parts: DistilledParts,
    ) -> tuple[dict[int, Both], UnitedQuality]:
        """Train all united experts of a way towards the whole model's answers, and measure what is stored."""
        begun = {
            layer: (
                torch.stack([one.gate_up for one in own]).float(),
                torch.stack([one.down for one in own]).float(),
            )
            for layer, own in made.items()
        }
        start = {} if self._start is None else self._start[way].manifest.digests
        part = parts.whole(way, start)
        training = joint.JointDistillation(network, way, begun, self._recipe, part)
        trained = training.train(self._text.train, self._tell)
        stored = {
            layer: (gate_up.to(self._dtype).float(), down.to(self._dtype).float())
            for layer, (gate_up, down) in trained.items()
        }
        return stored, joint.measure(network, Degraded(way, stored), self._text.held_out)

    def _measured(self, way: int, united: dict[int, Both], room: Path) -> Errors:
        """Measure united experts by the rows held out, as they are in the model without them."""
        found: Errors = {}
        passing = self._passing(self._text.held_out, room)
        for layer in range(self._config.num_layers):
            rows = passing.pass_layer(layer)
            if rows is not None:
                found[layer] = [
                    self._groups(layer, way, group, rows, 0)[1].relative_error(*both)
                    for group, both in enumerate(zip(*united[layer], strict=True))
                ]
        return found

    def _passing(self, sequences: Sequence[LearningSequence], room: Path) -> LayerByLayer:
        decoder = Decoder.load(self._checkpoint, self._config, torch.float32, _CPU)
        return LayerByLayer(self._checkpoint, decoder, [own.tokens for own in sequences], room)

    def _groups(
        self, layer: int, way: int, group: int, rows: RoutedRows, num_train: int
    ) -> tuple[Group, Group]:
        """Make the group of the first ``num_train`` rows, and that of the others."""
        num_experts = self._config.moe.num_experts
        experts = range(group * way, min((group + 1) * way, num_experts))
        weights = [
            load_expert(self._checkpoint, self._config, layer, expert, torch.float32, _CPU)
            for expert in experts
        ]
        both = zip(*(each.numbers(torch.float32) for each in weights), strict=True)
        gate_up, down = (torch.stack(matrices) for matrices in both)
        mine = np.flatnonzero((rows.ids // way == group).any(axis=1))
        own = np.stack(
            [np.where(rows.ids[mine] == e, rows.weights[mine], 0).sum(axis=1) for e in experts],
            axis=1,
        )
        train = mine < num_train

        def of(some: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Group:
            return Group(gate_up, down, rows.inputs, mine[some], torch.from_numpy(own[some]))

        return of(train), of(~train)

    def _by_group(self, layers: dict[int, Both]) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        return {
            (layer, group): (gate_up.to(self._dtype), down.to(self._dtype))
            for layer, both in layers.items()
            for group, (gate_up, down) in enumerate(zip(*both, strict=True))
        }

    def _num_groups(self, way: int) -> int:
        return Substitution(way=way).num_united(self._config.moe.num_experts)


def _opened(start: Path, config: ModelConfig, ways: Sequence[int]) -> dict[int, UnitedExperts]:
    if not start.is_dir():
        raise InvalidInput("--start", f"{start} is not a directory")
    found = find_united(start, config)
    if missing := [way for way in ways if way not in found]:
        raise InvalidInput("--start", f"{start} has no united experts of way {missing[0]}")
    return found
