"""The training loop: resumable, CPU or GPU, one seed, a progress bar.

The learning rate warms up, stays, and falls over the last fifth of ``--steps``; so a run can be
continued to a later ``--steps`` from any checkpoint written before the fall.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional as F

from models.training import corpus
from models.training.network import Network, Shape
from models.training.packs import Pack, Packer

WARMUP_STEPS, FALL_SHARE, BALANCE_WEIGHT, CLIP_NORM = 100, 0.2, 0.002, 1.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up, plateau, then a linear fall to a hundredth of the peak."""
    fall_from = steps * (1 - FALL_SHARE)
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    if step < fall_from:
        return peak
    return peak * max(0.01, (steps - step) / (steps - fall_from))


def optimizer_of(network: Network, peak: float) -> torch.optim.Optimizer:
    """AdamW, without decay on norms and embeddings."""
    decayed = [p for name, p in network.named_parameters() if p.ndim >= 2 and "embed" not in name]
    plain = [p for name, p in network.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-10, fused=True)


def to_batch(packs: list[Pack], device: torch.device) -> dict[str, torch.Tensor]:
    """Stack packs into the tensors that one step takes."""
    return {
        "tokens": torch.from_numpy(np.stack([p.tokens for p in packs])).to(device),
        "mask": torch.from_numpy(np.stack([p.mask() for p in packs])).unsqueeze(1).to(device),
        "positions": torch.from_numpy(np.stack([p.position for p in packs])).to(device),
        "weight": torch.from_numpy(np.stack([p.weight for p in packs])).to(device),
    }


def step_loss(
    network: Network, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted next-token loss, and the same plus the balance term."""
    hidden, balance, _ = network(batch["tokens"], batch["mask"], batch["positions"])
    weight = batch["weight"][:, :-1]
    rows = weight > 0
    logits = network.logits(hidden[:, :-1][rows]).float()
    losses = F.cross_entropy(logits, batch["tokens"][:, 1:][rows], reduction="none")
    loss = (losses * weight[rows]).sum() / weight.sum()
    return loss, loss + BALANCE_WEIGHT * balance


def save(
    path: Path, network: Network, optimizer: torch.optim.Optimizer, state: dict[str, object]
) -> None:
    """Write weights, optimizer moments and counters; a crash leaves the previous file whole."""
    from safetensors.torch import save_file

    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in moments.items()
        }
    fresh = path.with_suffix(".new")
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        fresh,
        metadata={"state": json.dumps(state)},
    )
    fresh.replace(path)


def load(path: Path, network: Network, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Read what ``save`` wrote, and return its counters."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        state = json.loads(file.metadata()["state"])
    network.load_state_dict(
        {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    )
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".")
            moments.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict(
        {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return dict(state)


def train(arguments: argparse.Namespace) -> None:
    """Train to ``--steps`` and leave the state in ``--work``."""
    from tokenizers import Tokenizer

    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    shape, device = Shape(), torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    tokenizer_file = work / "tokenizer.json"
    if not tokenizer_file.exists():
        corpus.train_tokenizer(shape.vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    network = Network(shape).to(device)
    optimizer = optimizer_of(network, arguments.learning_rate)
    state: dict[str, object] = {"step": 0, "seconds": 0.0, "tokens": 0}
    checkpoint = work / "state.safetensors"
    if checkpoint.exists():
        state = load(checkpoint, network, optimizer)
    first = int(state["step"])  # type: ignore[call-overload]
    packer = Packer(
        tokenizer, arguments.seed + first
    )  # a resumed run draws afresh, and still deterministically
    smooth, started = math.nan, time.monotonic()
    seconds_before = float(state["seconds"])  # type: ignore[arg-type]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress, (work / "log.jsonl").open("a") as log:
        bar = progress.add_task("training", total=arguments.steps, completed=first)
        for step in range(first, arguments.steps):
            length = 1024 if step % 4 == 0 else 512
            packs = [packer.pack(length) for _ in range(arguments.batch_tokens // length)]
            rate = learning_rate(step, arguments.steps, arguments.learning_rate)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, total = step_loss(network, to_batch(packs, device))
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
            optimizer.step()
            value = loss.item()
            smooth = value if math.isnan(smooth) else 0.98 * smooth + 0.02 * value
            state["step"] = step + 1
            state["tokens"] = int(state["tokens"]) + arguments.batch_tokens  # type: ignore[call-overload]
            state["seconds"] = seconds_before + time.monotonic() - started
            progress.update(bar, advance=1, description=f"loss {smooth:.3f}")
            if (step + 1) % 25 == 0:
                record = {
                    "step": step + 1,
                    "loss": round(smooth, 4),
                    "norm": round(float(norm), 3),
                    "rate": rate,
                }
                log.write(json.dumps(record | {"seconds": round(float(state["seconds"]))}) + "\n")  # type: ignore[arg-type]
                log.flush()
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                save(checkpoint, network, optimizer, state)
