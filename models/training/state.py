"""The state of a training run in one file: weights, the optimizers' moments, counters."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from models.training.network import Network


@dataclass
class Counters:
    """Progress of a run, over all of its resumptions.

    Attributes:
        loss: smoothed.
        hints: smoothed loss of the hints; None before the first one, as are the next five.
        told: smoothed loss of the attention to what answers in a text.
        listed: smoothed loss of the attention to the answer among what a question lists.
        said: smoothed loss of the attention to where a word of the answer stood before.
        echo: smoothed loss of such a word's token, asked of a middle layer.
        unlike: smoothed loss of words that cannot stand where they would.
        letters: true once the head that looks letters up was laid.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    hints: float | None = None
    told: float | None = None
    listed: float | None = None
    said: float | None = None
    echo: float | None = None
    unlike: float | None = None
    letters: bool = False


def save(
    path: Path, network: Network, optimizers: Sequence[torch.optim.Optimizer], counters: Counters
) -> None:
    """Write everything; a crash leaves the previous file whole."""
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for which, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{which}.{index}.{name}": torch.as_tensor(value)
                for name, value in moments.items()
            }
    fresh = path.with_suffix(".new")
    told = {"counters": json.dumps(vars(counters))}
    save_file({n: t.contiguous() for n, t in tensors.items()}, fresh, metadata=told)
    fresh.replace(path)


def load(path: Path, network: Network, optimizers: Sequence[torch.optim.Optimizer]) -> Counters:
    """Read what ``save`` wrote, and return its counters."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        counters = Counters(**json.loads(file.metadata()["counters"]))
    network.load_state_dict(
        {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    )
    for which, optimizer in enumerate(optimizers):
        moments: dict[int, dict[str, torch.Tensor]] = {}
        prefix = f"optimizer.{which}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                index, moment = name.removeprefix(prefix).split(".")
                moments.setdefault(int(index), {})[moment] = tensor
        optimizer.load_state_dict(
            {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
        )
    return counters
