"""Read one routed expert's weights, and nothing else."""

import math
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.tensor_names import MIXTRAL_NAMES, USUAL_NAMES, moe_prefix

_mine = threading.local()


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(silu(gate(x)) * up(x))``."""

    gate_up: Tensor  # [2I, H]: gate, then up
    down: Tensor  # [H, I]


def load_expert(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    expert: int,
    dtype: torch.dtype | None,
    device: torch.device,
) -> ExpertWeights:
    """Read routed expert ``expert`` of decoder layer ``layer``, from files of any naming.

    Args:
        checkpoint: of the model.
        config: of the model.
        layer: the decoder layer.
        expert: of the layer.
        dtype: of the weights; None: as they are stored, and lent until this thread reads the next expert so.
        device: of the weights.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or cannot be read.
    """
    size, hidden = config.moe.expert_size, config.hidden_size
    names = expert_tensors(checkpoint, config, layer, expert)
    lent, dtype = dtype is None, dtype or checkpoint.dtype_of(names)
    shapes = (2 * size, hidden), (hidden, size)
    both, down = _lend(shapes, dtype) if lent else [torch.empty(s, dtype=dtype) for s in shapes]
    if len(names) == 2:  # all experts of the layer in two tensors
        for name, into in zip(names, (both, down), strict=True):
            checkpoint.read_slice_into(name, expert, config.moe.num_experts, into)
    else:
        for name, into in zip(names, (both[:size], both[size:], down), strict=True):
            checkpoint.read_into(name, into)
    return ExpertWeights(both.to(device), down.to(device))


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


def expert_tensors(
    found: Container[str], config: ModelConfig, layer: int, expert: int
) -> tuple[str, ...]:
    """Name the tensors of an expert in files that have ``found``: gate, up and down; or gate_up and down of all."""
    assert layer in config.moe_layers
    assert 0 <= expert < config.moe.num_experts
    prefix = moe_prefix(found, layer) + "experts."
    if prefix + "gate_up_proj" in found:
        return prefix + "gate_up_proj", prefix + "down_proj"
    names = MIXTRAL_NAMES if f"{prefix}{expert}.w1.weight" in found else USUAL_NAMES
    return tuple(f"{prefix}{expert}.{name}.weight" for name in names)


def expert_bytes(checkpoint: Checkpoint, config: ModelConfig, layer: int, expert: int) -> int:
    """Bytes of an expert as it is stored."""
    names = expert_tensors(checkpoint, config, layer, expert)
    return checkpoint.nbytes(names) // (config.moe.num_experts if len(names) == 2 else 1)
