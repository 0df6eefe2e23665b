"""The training loop: resumable, CPU or GPU, one seed, a progress bar.

The learning rates warm up, stay, and fall over the last 30 % of ``--steps``; so a run can be
continued to a later ``--steps`` from any checkpoint written before the fall.
"""

import argparse
import ctypes
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from models.training import corpus, sources
from models.training.fused import compile_parts, weighted_loss
from models.training.heads import lay_heads, share_beginnings
from models.training.muon import Muon
from models.training.network import Network, Shape
from models.training.packs import Pack, Packer

WARMUP_STEPS, FALL_SHARE, FALL_TO = 100, 0.3, 0.02
BALANCE_WEIGHT, CLIP_NORM, MUON_DECAY = 0.002, 1.0, 0.01
# Of the packs of a step, in turns: one in four has room for all labels of the largest sets.
LENGTHS = {"all": (1024, 384, 384, 384), "basics": (256,)}
TOKENIZER_GROUPS = 3000
HINT_LAYER, HINT_WEIGHT = 4, 0.3
# A row of the tied embedding has a gradient in every step, most of it noise: at the rate of the other
# weights, rows walk so far that no head can match tokens.
EMBEDDING_RATE_SHARE = 0.15


def keep_freed_memory() -> None:
    """Let the C library keep and reuse what it frees, where it can be told so.

    A step makes and drops temporaries of many megabytes. By default glibc maps such blocks and gives
    them back each time, and the kernel then clears every page anew: it took a fifth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # as <malloc.h> numbers them
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)


def rate_factor(step: int, steps: int) -> float:
    """Warm-up from 0 to 1, plateau, then a linear fall to a fiftieth."""
    fall_from = steps * (1 - FALL_SHARE)
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    if step < fall_from:
        return 1.0
    return max(FALL_TO, (steps - step) / (steps - fall_from))


def optimizer_of(
    network: Network, muon_rate: float = 0.02, adam_rate: float = 3e-3
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the projections and experts; AdamW for embedding, gates and norms."""
    stacked, matrices, others = [], [], []
    for name, parameter in network.named_parameters():
        if name.endswith("mlp.gate_up"):
            stacked.append(parameter)
        elif name.endswith(("mlp.down", "_proj.weight")):
            matrices.append(parameter)
        elif "embed" not in name:
            others.append(parameter)
    embedding = {"params": [network.embed_tokens.weight], "share": EMBEDDING_RATE_SHARE}
    groups = [{"params": matrices}, {"params": stacked, "parts": 2}]
    return (
        Muon(groups, lr=muon_rate, weight_decay=MUON_DECAY),
        torch.optim.AdamW(
            [{"params": others, "share": 1.0}, embedding],
            lr=adam_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True,
        ),
    )  # fmt: skip


def to_batch(packs: list[Pack], device: torch.device) -> dict[str, torch.Tensor]:
    """Stack packs into the tensors that one step takes."""
    return {
        "tokens": torch.from_numpy(np.stack([p.tokens for p in packs])).to(device),
        "mask": torch.from_numpy(np.stack([p.mask() for p in packs])).unsqueeze(1).to(device),
        "positions": torch.from_numpy(np.stack([p.position for p in packs])).to(device),
        "weight": torch.from_numpy(np.stack([p.weight for p in packs])).to(device),
        "hint": torch.from_numpy(np.stack([p.hint for p in packs])).to(device),
    }


def step_loss(
    network: Network, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted next-token loss, and the same plus the terms of balance and of hints."""
    tapped: list[Tensor] = []
    hidden, balance, _ = network(batch["tokens"], batch["mask"], batch["positions"], tapped)
    weight = batch["weight"][:, :-1]
    rows = weight > 0
    loss = weighted_loss(
        hidden[:, :-1][rows],
        network.embed_tokens.weight,
        batch["tokens"][:, 1:][rows],
        weight[rows],
    )
    total = loss + BALANCE_WEIGHT * balance
    hinted = batch["hint"] >= 0
    if hinted.any():
        # Deep supervision: a layer below the one that looks letters up is asked for their words.
        thought = network.norm(tapped[HINT_LAYER][hinted])
        targets = batch["hint"][hinted]
        even = torch.ones(len(targets), device=thought.device)
        total = total + HINT_WEIGHT * weighted_loss(
            thought, network.embed_tokens.weight, targets, even
        )
    return loss, total


def save(
    path: Path,
    network: Network,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, object],
) -> None:
    """Write weights, the optimizers' moments and counters; a crash leaves the previous file whole."""
    from safetensors.torch import save_file

    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for which, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{which}.{index}.{name}": torch.as_tensor(value)
                for name, value in moments.items()
            }
    fresh = path.with_suffix(".new")
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        fresh,
        metadata={"state": json.dumps(state)},
    )
    fresh.replace(path)


def load(
    path: Path, network: Network, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, object]:
    """Read what ``save`` wrote, and return its counters."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        state = json.loads(file.metadata()["state"])
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
    return dict(state)


def train(arguments: argparse.Namespace) -> None:
    """Train to ``--steps`` and leave the state in ``--work``."""
    from tokenizers import Tokenizer

    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    shape, device = Shape(), torch.device(arguments.device)
    if device.type == "cpu":
        keep_freed_memory()
        compile_parts()
    torch.manual_seed(arguments.seed)
    tokenizer_file = work / "tokenizer.json"
    if arguments.start is not None and not tokenizer_file.exists():
        shutil.copy(arguments.start / "tokenizer.json", tokenizer_file)
    if not tokenizer_file.exists():
        curriculum = sources.sample_texts(TOKENIZER_GROUPS)
        corpus.train_tokenizer(shape.vocab_size, curriculum).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    network = Network(shape).to(device)
    optimizers = optimizer_of(network, arguments.learning_rate, arguments.adam_rate)
    peaks = (arguments.learning_rate, arguments.adam_rate)
    state: dict[str, object] = {"step": 0, "seconds": 0.0, "tokens": 0}
    checkpoint = work / "state.safetensors"
    if checkpoint.exists():
        state = load(checkpoint, network, optimizers)
    elif arguments.start is not None:
        network.load_hf(arguments.start)
    else:
        share_beginnings(network, tokenizer)
        lay_heads(network)
    first = int(state["step"])  # type: ignore[call-overload]
    packer = Packer(
        tokenizer, arguments.seed + first, sources.MIXTURES[arguments.mixture]
    )  # a resumed run draws afresh, and still deterministically
    lengths = LENGTHS[arguments.mixture]
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
            length = lengths[step % len(lengths)]
            packs = [packer.pack(length) for _ in range(arguments.batch_tokens // length)]
            factor = rate_factor(step, arguments.steps)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor * group.get("share", 1.0)
            loss, total = step_loss(network, to_batch(packs, device))
            value = loss.item()
            if not math.isfinite(total.item()):
                raise RuntimeError(
                    f"step {step + 1}: the loss is {value}; lower the learning rates, and go on from "
                    f"the last checkpoint in {work}"
                )
            total.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(
                network.parameters(), CLIP_NORM, error_if_nonfinite=True
            )
            for optimizer in optimizers:
                optimizer.step()
            smooth = value if math.isnan(smooth) else 0.98 * smooth + 0.02 * value
            state["step"] = step + 1
            state["tokens"] = int(state["tokens"]) + arguments.batch_tokens  # type: ignore[call-overload]
            state["seconds"] = seconds_before + time.monotonic() - started
            speed = (step + 1 - first) * arguments.batch_tokens / (time.monotonic() - started)
            progress.update(bar, advance=1, description=f"loss {smooth:.3f}, {speed:,.0f} tokens/s")
            if (step + 1) % 25 == 0:
                record = {
                    "step": step + 1,
                    "loss": round(smooth, 4),
                    "norm": round(float(norm), 3),
                    "rate": arguments.learning_rate * factor,
                    "tokens_per_second": round(speed),
                }
                log.write(json.dumps(record | {"seconds": round(float(state["seconds"]))}) + "\n")  # type: ignore[arg-type]
                log.flush()
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                save(checkpoint, network, optimizers, state)
