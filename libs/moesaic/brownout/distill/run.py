"""Distillation of all united experts of a model, resumable layer by layer."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.brownout.checkpoint import UnitedManifest, write_united
from moesaic.brownout.distill.states import LayerByLayer, RoutedRows
from moesaic.brownout.distill.united import Group, United, distil
from moesaic.brownout.split import num_united
from moesaic.experts.slots import load_table
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import Gate
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert

HELD_OUT_SHARE = 0.1  # of the sequences, the last ones


@dataclass(frozen=True)
class Recipe:
    """How united experts are trained.

    Attributes:
        ways: experts of one group, for each file.
        steps: of the optimizer, for each expert.
        batch: rows of a step.
        rate: of learning, at its highest.
        seed: of what is drawn.
    """

    ways: tuple[int, ...] = (2, 4, 8)
    steps: int = 600
    batch: int = 256
    rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """One united expert is done.

    Attributes:
        done: how many are.
        total: of all layers and ways.
        error: of this one.
    """

    done: int
    total: int
    layer: int
    way: int
    error: float


class Distillation:
    """United experts of one model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        model_digest: str,
        sequences: Sequence[Sequence[int]],
        recipe: Recipe,
        out: Path,
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Distil on the CPU in float32.

        Args:
            checkpoint: of the model.
            config: of the model.
            model_digest: of its weights.
            sequences: token ids; as many tokens as there is time for.
            recipe: of training.
            out: directory of the files; unfinished work lies in it as well.
            tell: is told of progress.
        """
        self._checkpoint, self._config, self._digest = checkpoint, config, model_digest
        self._sequences, self._recipe, self._out, self._tell = sequences, recipe, out, tell
        groups = sum(num_united(config.moe.num_experts, way) for way in recipe.ways)
        self._total, self._done = groups * len(config.moe_layers), 0

    async def run(self) -> list[Path]:
        """Distil what is not done yet, and write the files."""
        config, cpu = self._config, torch.device("cpu")
        decoder = Decoder.load(self._checkpoint, config, torch.float32, cpu)
        self._out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._out) as room:
            passing = LayerByLayer(decoder, self._sequences, Path(room))
            for layer in range(config.num_layers):
                if layer not in config.moe_layers:
                    await passing.pass_dense(layer)
                    continue
                everything = {layer: list(range(config.moe.num_experts))}
                table = load_table(self._checkpoint, config, everything, torch.float32, cpu).table
                gate = Gate.load(self._checkpoint, config, layer, torch.float32, cpu)
                rows = await passing.pass_sparse(layer, gate, table)
                del table
                self._distil_layer(layer, rows)
        return self._write()

    def _distil_layer(self, layer: int, rows: RoutedRows) -> None:
        for way in self._recipe.ways:
            part, groups = self._part(layer, way), num_united(self._config.moe.num_experts, way)
            if part.exists():
                self._done += groups
                continue
            made = []
            for group in range(groups):
                made.append(self._distil_group(layer, way, group, rows))
                self._done += 1
                self._tell(Progress(self._done, self._total, layer, way, made[-1].error))
            tensors = {f"{i}.gate_up": one.gate_up for i, one in enumerate(made)}
            tensors |= {f"{i}.down": one.down for i, one in enumerate(made)}
            errors = msgspec.json.encode([one.error for one in made]).decode()
            fresh = part.with_suffix(".new")
            save_file(tensors, fresh, metadata={"errors": errors})
            fresh.replace(part)

    def _distil_group(self, layer: int, way: int, group: int, rows: RoutedRows) -> United:
        config, recipe = self._config, self._recipe
        first = group * way
        experts = range(first, min(first + way, config.moe.num_experts))
        weights = [
            load_expert(self._checkpoint, config, layer, e, torch.float32, torch.device("cpu"))
            for e in experts
        ]
        held_out = round(sum(map(len, self._sequences)) * (1 - HELD_OUT_SHARE))

        def part_of(some: slice) -> Group:
            chosen = torch.from_numpy(rows.ids[some])
            gate_weights = torch.from_numpy(rows.weights[some])
            own = torch.stack(
                [torch.where(chosen == e, gate_weights, 0).sum(dim=1) for e in experts], dim=1
            )
            wanted = (own > 0).any(dim=1)
            return Group(
                torch.stack([w.gate_up for w in weights]),
                torch.stack([w.down for w in weights]),
                torch.from_numpy(rows.inputs[some][wanted.numpy()]),
                own[wanted],
            )

        seed = hash((recipe.seed, layer, way, group)) & 0xFFFFFFFF
        train, test = part_of(slice(0, held_out)), part_of(slice(held_out, None))
        return distil(train, test, recipe.steps, recipe.batch, recipe.rate, seed)

    def _part(self, layer: int, way: int) -> Path:
        """Results of a layer wait here until all are there; of other weights or recipes they are others."""
        made_by = msgspec.json.encode([self._digest, self._recipe.steps, self._recipe.batch,
                                       self._recipe.rate, self._recipe.seed])  # fmt: skip
        name = f".united-{torch.tensor(list(made_by)).sum().item():x}-{way}-{layer}.safetensors"
        return self._out / name

    def _write(self) -> list[Path]:
        written, config = [], self._config
        for way in self._recipe.ways:
            experts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
            errors = {}
            for layer in config.moe_layers:
                tensors = load_file(self._part(layer, way))
                with safe_open(self._part(layer, way), "pt") as file:
                    errors[layer] = msgspec.json.decode(file.metadata()["errors"], type=list[float])
                for group in range(len(errors[layer])):
                    both = tensors[f"{group}.gate_up"], tensors[f"{group}.down"]
                    experts[layer, group] = both[0].bfloat16(), both[1].bfloat16()
            manifest = UnitedManifest(
                way=way,
                model_digest=self._digest,
                errors=errors,
                rows=sum(map(len, self._sequences)),
            )
            written.append(write_united(self._out, manifest, experts))
        for way in self._recipe.ways:
            for layer in config.moe_layers:
                self._part(layer, way).unlink()
        return written
