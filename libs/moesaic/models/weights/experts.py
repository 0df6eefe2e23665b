"""Read one routed expert's weights, and nothing else."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.stored_weights import StoredWeight, dequantised, take_rows
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.names import shared_scales, stored_names
from moesaic.models.weights.formats.reading import joined, read_apart, read_entry, read_matrix
from moesaic.models.weights.formats.rounding import rounded
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names

_mine = threading.local()


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(activation(gate(x), up(x)))``."""

    gate_up: StoredWeight  # [2I, H]: gate, then up
    down: StoredWeight  # [H, I]
    biases: tuple[Tensor, Tensor] | None = None  # [2I] and [H]

    def numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what both matrices stand for."""
        return dequantised(self.gate_up, dtype), dequantised(self.down, dtype)

    def rounded(self, form: WeightForm | None) -> "ExpertWeights":
        """Return the same with its matrices in ``form``, see there."""
        return ExpertWeights(rounded(self.gate_up, form), rounded(self.down, form), self.biases)


def load_expert(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    expert: int,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    lent: bool = False,
) -> ExpertWeights:
    """Read routed expert ``expert`` of decoder layer ``layer``, from files of any naming and format.

    Args:
        checkpoint: checkpoint of the model.
        config: configuration of the model.
        layer: the decoder layer.
        expert: id of the expert in the layer.
        dtype: dtype of weights that are not quantised; None: as they are stored.
        device: device of the weights; on a CPU quantised weights stay codes if they can.
        lent: the memory may be reused when this thread reads the next expert with this argument.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or cannot be read.
    """
    assert layer in config.moe_layers
    assert 0 <= expert < config.moe.num_experts
    layout = sparse_names(config, checkpoint, layer)
    if config.weight_format is not None or layout.by_turns or config.moe.expert_bias:
        return _load_apart(checkpoint, config, layer, expert, dtype, device)
    size, hidden = config.moe.expert_size, config.hidden_size
    names = [layer_prefix(layer) + name.format(expert) for name in layout.experts]
    dtype, shapes = dtype or checkpoint.dtype_of(names), ((2 * size, hidden), (hidden, size))
    both, down = _lend(shapes, dtype) if lent else [torch.empty(s, dtype=dtype) for s in shapes]
    # All experts of the layer in two tensors.
    if len(names) == 2:
        for name, into in zip(names, (both, down), strict=True):
            checkpoint.read_slice_into(name, expert, config.moe.num_experts, into)
    else:
        for name, into in zip(names, (both[:size], both[size:], down), strict=True):
            checkpoint.read_into(name, into)
    return ExpertWeights(both.to(device), down.to(device))


def expert_bytes(checkpoint: Checkpoint, config: ModelConfig, layer: int, expert: int) -> int:
    """Stored bytes of an expert."""
    layout, moe = sparse_names(config, checkpoint, layer), config.moe
    names = [name.format(expert) for name in layout.experts]
    if moe.expert_bias:
        names.extend(layout.biases)
    stored = (
        stored_names(config.weight_format, layer_prefix(layer) + name, checkpoint) for name in names
    )
    num_bytes = checkpoint.nbytes(chain.from_iterable(stored))
    of_all = checkpoint.nbytes(_shared_scales(checkpoint, config, layer))
    return (
        num_bytes if len(layout.experts) == 3 else num_bytes // moe.num_experts
    ) + of_all // moe.num_experts


def _shared_scales(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> tuple[str, ...]:
    prefix, layout = layer_prefix(layer), sparse_names(config, checkpoint, layer)
    names = [prefix + name for name in layout.experts]
    return shared_scales(config.weight_format, names, checkpoint)


def _load_apart(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    expert: int,
    dtype: torch.dtype | None,
    device: torch.device,
) -> ExpertWeights:
    """Read an expert of codes, of matrices that lie another way round, or with biases."""
    prefix, weight_format = layer_prefix(layer), config.weight_format
    layout = sparse_names(config, checkpoint, layer)
    names = [prefix + name.format(expert) for name in layout.experts]
    biases = [prefix + name for name in layout.biases]
    if dtype is None:
        dtype = torch.float32 if weight_format else checkpoint.dtype_of((*names, *biases))
    # All experts of the layer in two tensors.
    if len(names) == 2:
        reader = _OfAll(checkpoint, config, expert, layout.by_turns, dtype, device)
        found = reader.read(names, biases)
    elif weight_format is not None and (scales := _shared_scales(checkpoint, config, layer)):
        size, hidden, num = config.moe.expert_size, config.hidden_size, config.moe.num_experts
        gate_up, down = (
            read_apart(checkpoint, weight_format, of, name, expert, (num, *shape), dtype, device)
            for of, name, shape in (
                ((names[0], names[1]), scales[0], (2 * size, hidden)),
                ((names[2],), scales[1], (hidden, size)),
            )
        )
        found = ExpertWeights(gate_up, down)
    else:
        size, hidden = config.moe.expert_size, config.hidden_size
        shapes = (size, hidden), (size, hidden), (hidden, size)
        gate, up, down = (
            read_matrix(checkpoint, weight_format, name, shape, dtype, device)
            for name, shape in zip(names, shapes, strict=True)
        )
        found = ExpertWeights(joined((gate, up), dtype), down)
    coded = device.type == "cpu" and weight_format is not None and weight_format.held is not None
    if coded and (isinstance(found.gate_up, Tensor) or isinstance(found.down, Tensor)):
        raise CheckpointError(
            "config.json",
            "quantization_config: partly quantised experts are not supported",
            tensor=names[0],
        )
    return found


@dataclass(frozen=True)
class _OfAll:
    """Reads one expert from tensors with all experts: two of matrices, and two of biases if there are any."""

    checkpoint: Checkpoint
    config: ModelConfig
    expert: int
    by_turns: bool  # see ``SparseNames``
    dtype: torch.dtype
    device: torch.device

    def read(self, names: Sequence[str], biases: Sequence[str]) -> ExpertWeights:
        size, hidden = self.config.moe.expert_size, self.config.hidden_size
        gate_up = self._matrix(names[0], 2 * size, hidden, halves=2)
        down = self._matrix(names[1], hidden, size, halves=1)
        order = torch.arange(2 * size)
        if self.by_turns:
            order = torch.cat((order[::2], order[1::2]))
            gate_up = take_rows(gate_up, order)
        if not self.config.moe.expert_bias:
            return ExpertWeights(gate_up, down)
        of_gate_up, of_down = self._bias(biases[0], 2 * size), self._bias(biases[1], hidden)
        return ExpertWeights(gate_up, down, (of_gate_up[order], of_down))

    def _matrix(self, name: str, num_out: int, num_in: int, halves: int) -> StoredWeight:
        num, form, place = self.config.moe.num_experts, self.config.weight_format, self.expert
        # Codes are never transposed.
        if self.by_turns and name in self.checkpoint:
            return self._slice(name, num, num_in, num_out).T.contiguous()
        shape = num, num_out, num_in
        return read_entry(
            self.checkpoint, form, name, place, shape, self.dtype, self.device, halves
        )

    def _bias(self, name: str, size: int) -> Tensor:
        return self._slice(name, self.config.moe.num_experts, size)

    def _slice(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.read_slice(name, self.expert, shape, self.dtype, self.device)


def _lend(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Give out tensors that are this thread's until it asks again.

    In memory of their own they would be freed only in part: what is kept of each expert would lie behind the freed
    rest, which glibc could not give back.
    """
    sizes = [math.prod(shape) for shape in shapes]
    num_bytes = sum(sizes) * dtype.itemsize
    kept: Tensor | None = getattr(_mine, "memory", None)
    if kept is None or kept.nbytes < num_bytes:
        kept = _mine.memory = torch.empty(num_bytes, dtype=torch.uint8)
    parts = torch.split(kept[:num_bytes].view(dtype), sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
