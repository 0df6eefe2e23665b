"""The training loop: resumable, CPU or GPU, one seed, a progress bar.

The learning rates warm up, stay, and fall over the last fifth of ``--steps``. So a run can be
continued to a later ``--steps`` from any checkpoint written before the fall.
"""

import argparse
import ctypes
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from models.training import corpus, sources
from models.training.evidence import LAYERS, evidence_losses, to_looks
from models.training.fused import compile_parts, weighted_loss
from models.training.heads import lay_heads, share_beginnings
from models.training.letters import HINT_LAYER, lay_letter_head
from models.training.muon import Muon
from models.training.network import Network, Shape
from models.training.packs import Pack, Packer
from models.training.state import Counters, load, save

WARMUP_STEPS, FALL_SHARE, FALL_TO = 100, 0.2, 0.02
BALANCE_WEIGHT, CLIP_NORM, MUON_DECAY = 0.002, 1.0, 0.01
# Of the packs of a step, in turns: one in four has room for all labels of the largest sets.
LENGTHS = {"all": (1536, 384, 384, 384), "basics": (256,)}
TOKENIZER_GROUPS = 3000
SUBJECT_LAYER, HINT_WEIGHT, EVIDENCE_WEIGHT, UNLIKE_WEIGHT = 2, 0.3, 0.3, 1.0
SAID_LAYER = LAYERS["said"]
# The head that looks letters up is laid when hints are as likely as this: the words are found.
WORDS_FOUND_LOSS = 0.7
MEMORY, LOG_EVERY = 0.98, 25
SMOOTHED = ("hints", "told", "listed", "said", "echo", "unlike")
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
    network: Network, muon_rate: float = 0.004, adam_rate: float = 3e-3
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
        "subject": torch.from_numpy(np.stack([p.subject for p in packs])).to(device),
        "unlike": torch.tensor(
            [(i, *pair) for i, pack in enumerate(packs) for pair in pack.unlike], dtype=torch.int64
        ).to(device),
    } | to_looks(packs, device)


@dataclass
class Losses:
    """Results of one step's forward pass.

    Attributes:
        next_token: weighted mean over rows.
        total: the same plus balance, hints and evidence; what is minimised.
        hints: of the words asked of a middle layer; nan without any, as are the others.
        told: of the attention to what answers in a text.
        listed: of the attention to the answer among what the question lists.
        said: of the attention to where a word of the answer stood before.
        echo: of such a word's token, asked of a middle layer.
        unlike: of the probability of words that cannot stand where they would.
    """

    next_token: Tensor
    total: Tensor
    hints: float = math.nan
    told: float = math.nan
    listed: float = math.nan
    said: float = math.nan
    echo: float = math.nan
    unlike: float = math.nan


def step_loss(network: Network, batch: dict[str, Tensor]) -> Losses:
    """Compute a batch's losses."""
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
    losses = Losses(loss, loss + BALANCE_WEIGHT * balance)
    # Deep supervision: who a sentence is about, and below the layer that looks letters up, their words.
    for kind, layer in (("subject", SUBJECT_LAYER), ("hint", HINT_LAYER)):
        hinted = batch[kind] >= 0
        if hinted.any():
            thought, targets = network.norm(tapped[layer][hinted]), batch[kind][hinted]
            even = torch.ones(len(targets), device=thought.device)
            hint_loss = weighted_loss(thought, network.embed_tokens.weight, targets, even)
            losses.total, losses.hints = losses.total + HINT_WEIGHT * hint_loss, hint_loss.item()
    if (echo := _echo_loss(network, batch, tapped)) is not None:
        losses.total, losses.echo = losses.total + HINT_WEIGHT * echo, echo.item()
    for look, missed in evidence_losses(network, tapped, batch).items():
        losses.total = losses.total + EVIDENCE_WEIGHT * missed
        setattr(losses, look, missed.item())
    if len(batch["unlike"]):
        unlike = _unlike_loss(network, batch, hidden)
        losses.total, losses.unlike = losses.total + UNLIKE_WEIGHT * unlike, unlike.item()
    return losses


def _echo_loss(network: Network, batch: dict[str, Tensor], tapped: list[Tensor]) -> Tensor | None:
    """Ask a middle layer for the tokens that are copied, as soon as the head in it has looked."""
    if not len(batch["said_rows"]):
        return None
    pack, end = batch["said_rows"].unbind(dim=1)
    targets = batch["tokens"][pack, end + 1]
    stood = ((batch["tokens"][pack] == targets.unsqueeze(1)) & batch["said_at"]).any(dim=1)
    if not stood.any():
        return None
    thought, targets = network.norm(tapped[SAID_LAYER][pack[stood], end[stood]]), targets[stood]
    even = torch.ones(len(targets), device=thought.device)
    return weighted_loss(thought, network.embed_tokens.weight, targets, even)


def _unlike_loss(network: Network, batch: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Mean negative log of the probability of anything else than what cannot stand there."""
    pack, place, token = batch["unlike"].unbind(dim=1)
    logits = F.linear(hidden[pack, place], network.embed_tokens.weight)
    chance = logits.softmax(dim=-1).gather(1, token.unsqueeze(1))
    return -torch.log1p(-chance.clamp(max=1 - 1e-6)).mean()


def train(arguments: argparse.Namespace) -> None:
    """Train to ``--steps`` and leave the state in ``--work``."""
    run = Run(arguments)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress, (arguments.work / "log.jsonl").open("a") as log:
        bar = progress.add_task("training", total=arguments.steps, completed=run.counters.step)
        while run.counters.step < arguments.steps:
            record = run.step()
            told = f"loss {record['loss']:.3f}, {record['tokens_per_second']:,} tokens/s"
            progress.update(bar, advance=1, description=told)
            step = run.counters.step
            if step % LOG_EVERY == 0:
                log.write(json.dumps(record) + "\n")
                log.flush()
            if step % arguments.save_every == 0 or step == arguments.steps:
                save(run.checkpoint, run.network, run.optimizers, run.counters)


class Run:
    """One run of the recipe: begun, or gone on with where ``--work`` has a state."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        work: Path = arguments.work
        work.mkdir(parents=True, exist_ok=True)
        self._arguments, self._device = arguments, torch.device(arguments.device)
        if self._device.type == "cpu":
            keep_freed_memory()
            compile_parts()
        torch.manual_seed(arguments.seed)
        self._tokenizer = _tokenizer(work, arguments.start)
        self.network = Network(Shape()).to(self._device)
        self.optimizers = optimizer_of(self.network, arguments.learning_rate, arguments.adam_rate)
        self.checkpoint, self.counters = work / "state.safetensors", Counters()
        if self.checkpoint.exists():
            self.counters = load(self.checkpoint, self.network, self.optimizers)
        elif arguments.start is not None:
            self.network.load_hf(arguments.start)
            self.counters.letters = True
        else:
            share_beginnings(self.network, self._tokenizer)
            lay_heads(self.network)
        # A resumed run draws afresh, and still deterministically.
        self._first, shares = self.counters.step, sources.MIXTURES[arguments.mixture]
        self._packer = Packer(self._tokenizer, arguments.seed + self._first, shares)
        self._started, self._seconds_before = time.monotonic(), self.counters.seconds

    def step(self) -> dict[str, float]:
        """Take one step, and tell of it.

        Raises:
            RuntimeError: the loss is no number any more.
        """
        arguments, counters = self._arguments, self.counters
        lengths = LENGTHS[arguments.mixture]
        length = lengths[counters.step % len(lengths)]
        packs = [self._packer.pack(length) for _ in range(arguments.batch_tokens // length)]
        factor = self._set_rates()
        losses = step_loss(self.network, to_batch(packs, self._device))
        if not math.isfinite(losses.total.item()):
            raise RuntimeError(
                f"step {counters.step + 1}: the loss is {losses.total.item()}; lower the learning rates, and "
                f"go on from the last checkpoint in {arguments.work}"
            )
        losses.total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(
            self.network.parameters(), CLIP_NORM, error_if_nonfinite=True
        )
        for optimizer in self.optimizers:
            optimizer.step()
        counters.loss = _smoothed(counters.loss, losses.next_token.item())
        for name in SMOOTHED:
            value = _smoothed(getattr(counters, name), getattr(losses, name))
            setattr(counters, name, value)
        if not counters.letters and (counters.hints or math.inf) < WORDS_FOUND_LOSS:
            lay_letter_head(self.network, self._tokenizer, arguments.seed)
            counters.letters = True
        counters.step += 1
        counters.tokens += arguments.batch_tokens
        passed = time.monotonic() - self._started
        counters.seconds = self._seconds_before + passed
        return {
            "step": counters.step,
            "loss": round(counters.loss or math.nan, 4),
            **{name: round(getattr(counters, name) or math.nan, 3) for name in SMOOTHED},
            "norm": round(float(norm), 3),
            "rate": arguments.learning_rate * factor,
            "tokens_per_second": round(
                (counters.step - self._first) * arguments.batch_tokens / passed
            ),
            "seconds": round(counters.seconds),
        }

    def _set_rates(self) -> float:
        """Set the step's learning rates, and forget the gradients of the one before."""
        factor = rate_factor(self.counters.step, self._arguments.steps)
        peaks = (self._arguments.learning_rate, self._arguments.adam_rate)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = peak * factor * group.get("share", 1.0)
        return factor


def _tokenizer(work: Path, start: Path | None) -> Tokenizer:
    """Read the run's tokenizer, or the one of the checkpoint to go on from, or train one."""
    file = work / "tokenizer.json"
    if start is not None and not file.exists():
        shutil.copy(start / "tokenizer.json", file)
    if not file.exists():
        curriculum = sources.sample_texts(TOKENIZER_GROUPS)
        corpus.train_tokenizer(Shape().vocab_size, curriculum).save(str(file))
    return Tokenizer.from_file(str(file))


def _smoothed(before: float | None, value: float) -> float | None:
    if math.isnan(value):
        return before
    return value if before is None else MEMORY * before + (1 - MEMORY) * value
