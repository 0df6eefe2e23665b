"""The second stage: all united experts of one way learn together what the whole model answers.

Errors of one layer change what the next ones see, which no layer by itself can learn. Half of the steps degrade
everything, the others leave each sequence's most popular experts, as a batch that is served leaves its own.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from moesaic.models.weights.library import read_tensors
from moesaic.models.weights.united import UnitedQuality
from moesaic_lab.distillation.frozen import Both
from moesaic_lab.distillation.network import Degraded, PassedRows, TrainableModel
from moesaic_lab.distillation.recipe import DistillProgress, Recipe, pace, rates
from moesaic_lab.distillation.texts import LearningSequence

ALL_SHARE = 0.5  # of the steps, in which every choice is degraded
HIDDEN_WEIGHT = 0.5  # of the error of hidden states, beside the divergence of answers
MOST_THRESHOLD = 0.8
SAVE_EVERY = 50  # steps
MEASURED_ROWS = 20_000  # held out, at most
_BATCH_TOKENS = 4096  # of a pass that is measured

Sequences = Sequence[LearningSequence]
Tell = Callable[[DistillProgress], None]


class JointDistillation:
    """The united experts of one way, trained as a whole."""

    def __init__(
        self,
        network: TrainableModel,
        way: int,
        begun: Mapping[int, Both],
        recipe: Recipe,
        part: Path,
    ) -> None:
        """Begin, or go on where ``part`` was saved.

        Args:
            network: the model.
            way: experts of one group.
            begun: united experts by sparse layer, float32 ``[U, 2I, H]`` and ``[U, H, I]``.
            recipe: of training.
            part: file of what is done, which only this training writes.
        """
        self._network, self._way, self._recipe, self._part = network, way, recipe, part
        self._united = {
            layer: (gate_up.clone().requires_grad_(), down.clone().requires_grad_())
            for layer, (gate_up, down) in begun.items()
        }
        self._parameters = [weights for both in self._united.values() for weights in both]
        groups = rates(self._parameters, recipe.joint_rate)
        self._rates = [group["lr"] for group in groups]
        self._optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self._step = 0
        if part.exists():
            self._load()

    def train(self, sequences: Sequences, tell: Tell) -> dict[int, Both]:
        """Take the steps that are left; returns the united experts.

        Args:
            sequences: token ids to learn from.
            tell: is told of every step.
        """
        steps = self._recipe.joint_steps
        while self._step < steps:
            loss = self._take_step(sequences)
            self._step += 1
            if self._step % SAVE_EVERY == 0 or self._step == steps:
                self._save()
            note = f"divergence {loss:.4f}"
            tell(DistillProgress(f"way {self._way}, whole model", self._step, steps, note))
        return {layer: (both[0].detach(), both[1].detach()) for layer, both in self._united.items()}

    def _take_step(self, sequences: Sequences) -> float:
        """Learn from one batch; what is drawn depends on the seed and the number of the step alone."""
        rng = random.Random(f"{self._recipe.seed} {self._way} {self._step}")
        batch = _drawn(sequences, rng, self._recipe.joint_tokens)
        every, threshold = rng.random() < ALL_SHARE, self._recipe.joint_threshold
        if threshold is None:
            threshold = rng.uniform(0, MOST_THRESHOLD)
        tokens, rows = [own.tokens for own in batch], _asked_rows(batch)
        with torch.no_grad():
            exact = self._network.compute(tokens, None, rows)
        degraded = Degraded(self._way, self._united, 0.0 if every else threshold, not every)
        united = self._network.compute(tokens, degraded, rows)
        divergence = divergence_of(exact, united, _weights(batch))
        loss = divergence + HIDDEN_WEIGHT * _hidden_error(exact, united)
        scale = pace(self._step, self._recipe.joint_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * scale
        # Else every expert stayed.
        if loss.requires_grad:
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            self._optimizer.step()
        return float(divergence.detach())

    def _save(self) -> None:
        tensors = {"step": torch.tensor(self._step)}
        for index, weights in enumerate(self._parameters):
            tensors[f"{index}.weights"] = weights.detach()
            state = self._optimizer.state[weights]
            tensors |= {f"{index}.{name}": value for name, value in state.items()}
        fresh = self._part.with_suffix(".new")
        save_file(tensors, fresh)
        fresh.replace(self._part)

    def _load(self) -> None:
        tensors = read_tensors(self._part)
        self._step = int(tensors["step"])
        for index, weights in enumerate(self._parameters):
            weights.detach().copy_(tensors[f"{index}.weights"])
            self._optimizer.state[weights] = {
                name: tensors[f"{index}.{name}"]
                for name in ("step", "exp_avg", "exp_avg_sq")
                if f"{index}.{name}" in tensors
            }


@torch.no_grad()
def measure(network: TrainableModel, degraded: Degraded, sequences: Sequences) -> UnitedQuality:
    """Compare a degraded model with the exact one, on tokens that the model would be asked for."""
    exact = united = same = 0.0
    count = 0
    for batch in _batches(sequences):
        tokens, rows = [own.tokens for own in batch], _asked_rows(batch)
        targets = torch.tensor([token for own in batch for token in own.tokens])[rows + 1]
        a, b = (network.compute(tokens, how, rows).logits for how in (None, degraded))
        exact += float(F.cross_entropy(a, targets, reduction="sum"))
        united += float(F.cross_entropy(b, targets, reduction="sum"))
        same += float((a.argmax(dim=-1) == b.argmax(dim=-1)).sum())
        count += len(rows)
        if count >= MEASURED_ROWS:
            break
    return UnitedQuality(exact=exact / count, united=united / count, agreement=same / count)


def divergence_of(exact: PassedRows, united: PassedRows, weights: Tensor | None = None) -> Tensor:
    """Compute the Kullback-Leibler divergence of next tokens, the mean over rows in nats.

    Args:
        exact: of the whole model.
        united: of the degraded one.
        weights: of the rows; None: alike.
    """
    of_rows = F.kl_div(
        united.logits.log_softmax(dim=-1),
        exact.logits.log_softmax(dim=-1),
        reduction="none",
        log_target=True,
    ).sum(dim=-1)
    return of_rows.mean() if weights is None else (of_rows * weights).sum() / weights.sum()


def _weights(batch: Sequences) -> Tensor:
    """Weigh the asked rows of each sequence by one over the root of their number: a label counts beside a story."""
    lengths = torch.tensor([len(own) - own.answer for own in batch])
    return lengths.float().rsqrt().repeat_interleave(lengths)


def _asked_rows(batch: Sequences) -> Tensor:
    """List the rows whose next token the model would be asked for."""
    starts = accumulate((len(own) for own in batch), initial=0)
    return torch.cat(
        [
            torch.arange(start + own.answer - 1, start + len(own) - 1)
            for start, own in zip(starts, batch, strict=False)
        ]
    )


def _hidden_error(wanted: PassedRows, got: PassedRows) -> Tensor:
    """Squared error of each layer's rows over their squared length, the mean over layers."""
    errors = [
        (b - a).square().sum() / a.square().sum().clamp(min=1e-12)
        for a, b in zip(wanted.hidden, got.hidden, strict=True)
    ]
    return torch.stack(errors).mean()


def _drawn(sequences: Sequences, rng: random.Random, tokens: int) -> list[LearningSequence]:
    batch: list[LearningSequence] = []
    while not batch or sum(map(len, batch)) < tokens:
        batch.append(rng.choice(sequences))
    return batch


def _batches(sequences: Sequences) -> list[list[LearningSequence]]:
    out: list[list[LearningSequence]] = [[]]
    for own in sequences:
        if out[-1] and sum(map(len, out[-1])) + len(own) > _BATCH_TOKENS:
            out.append([])
        out[-1].append(own)
    return out
