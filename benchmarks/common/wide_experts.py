"""The demo model with wider experts: the same answers at the cost of a larger model.

In most served models the experts are nearly all of the weights; the demo's are so small that they stay in a
processor's caches. Here each neuron of an expert stands there several times, and each copy gives its part of what the
neuron gave. So every layer computes what it did, up to rounding, and right answers can be counted as before.
"""

import shutil
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import weights_digest
from moesaic.models.weights.united import find_united, tensor_name, write_united

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "moesaic.json")


def widen_experts(model: Path, directory: Path, times: int) -> None:
    """Write ``model`` into ``directory``, with experts, united ones included, ``times`` as wide.

    Args:
        model: a checkpoint in one file, with united experts beside it or not.
        directory: to write into; it exists.
        times: a power of two, so that a part of a weight is stored exactly.
    """
    settings = msgspec.json.decode((model / "config.json").read_bytes())
    settings["moe_intermediate_size"] *= times
    (directory / "config.json").write_bytes(msgspec.json.encode(settings))
    for name in COPIED:
        shutil.copy(model / name, directory)
    tensors = load_file(model / "model.safetensors")
    wide = {
        name: _widened(name, tensor, times) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
    digest = weights_digest(Checkpoint(directory).files)
    for united in find_united(model, load_config(model)).values():
        parts = {
            name: _widened(name, tensor, times) for name, tensor in load_file(united.path).items()
        }
        experts = {
            (layer, group): (
                parts[tensor_name(layer, group, "gate_up")],
                parts[tensor_name(layer, group, "down")],
            )
            for layer in united.config.moe_layers
            for group in range(united.num_groups)
        }
        write_united(
            directory, msgspec.structs.replace(united.manifest, model_digest=digest), experts
        )


def _widened(name: str, tensor: Tensor, times: int) -> Tensor:
    """Repeat each neuron: rows of what goes in, a part of the columns of what comes out."""
    if ".down" in name:
        return tensor.repeat_interleave(times, dim=1) / times
    return tensor.repeat_interleave(times, dim=0)
