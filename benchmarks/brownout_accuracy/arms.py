"""The substitutions that are compared, and what one of them makes of the questions at one threshold."""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch
from torch import Tensor

from benchmarks.brownout_accuracy.losses import Rows
from benchmarks.brownout_accuracy.paper import WAYS
from benchmarks.brownout_accuracy.serving import CPU, Ask, OneEngine, Told
from benchmarks.brownout_accuracy.tasks import TaskSet, cross_entropy
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.messages.substitution import Rule, Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.united import find_united

RULES: tuple[Rule, ...] = get_args(Rule)
CHECKED = 5  # every fifth prompt is asked at threshold 1 too


@dataclass(frozen=True)
class Point:
    """A substitution at one threshold.

    Attributes:
        rows: true for each row of a set that was answered right.
        degraded: mean share of choices that their own experts did not serve; sets weigh alike.
        cross_entropy: cross-entropy of held-out text, in nats per token.
    """

    rows: Rows
    degraded: float
    cross_entropy: float


@dataclass(frozen=True)
class Questions:
    """All that a substitution is asked at each threshold."""

    sets: Sequence[TaskSet]
    windows: Sequence[Ask]

    @property
    def checked(self) -> list[Ask]:
        """Some of every kind, to compare bit by bit."""
        asks = [ask for one in self.sets for ask in one.asks] + list(self.windows)
        return asks[::CHECKED]


def training_free(directory: Path) -> dict[str, LoadedSubstitution]:
    """Load the substitutions that need no distillation, by name."""
    with _without_united(directory) as bare:
        # It finds no united experts, and so takes means.
        loader = LocalDispatcher(
            Checkpoint(bare), load_config(bare), torch.float32, CPU
        ).substitutions
        means = [(f"mean-{way}", Substitution(way=way, instead="united")) for way in WAYS]
        others = [
            ("fewer", Substitution(instead="fewer")),
            ("nothing", Substitution(instead="nothing")),
        ]
        return {name: loader.load(substitution) for name, substitution in means + others}


def name_of(way: int, rule: Rule = "tokens") -> str:
    """Name a substitution of distilled united experts."""
    return f"united-{way}" if rule == "tokens" else f"united-{way}-{rule}"


def rule_of(name: str) -> tuple[str, str]:
    """Split the name of a substitution into that of the same substitution by the paper's rule, and its own rule."""
    for rule in RULES:
        if name.endswith(f"-{rule}"):
            return name.removesuffix(f"-{rule}"), rule
    return name, "tokens"


def distilled(
    engine: OneEngine, directory: Path, homes: Mapping[int, Tensor]
) -> dict[str, LoadedSubstitution]:
    """Load the united experts that lie beside a model, under each rule, by name.

    Args:
        engine: engine that is asked.
        directory: directory of the model.
        homes: the worker of each expert by layer, for the rule ``instances``: here one process has them all.
    """
    found = find_united(directory, load_config(directory))
    substitutions = {}
    for rule in RULES:
        for way in (way for way in WAYS if way in found):
            loaded = engine.dispatcher.substitutions.load(
                Substitution(way=way, instead="united", rule=rule)
            )
            substitutions[name_of(way, rule)] = (
                _apart(loaded, homes) if rule == "instances" else loaded
            )
    return substitutions


def _apart(loaded: LoadedSubstitution, homes: Mapping[int, Tensor]) -> LoadedSubstitution:
    layers = {layer: replace(each, homes=homes[layer]) for layer, each in loaded.layers.items()}
    return replace(loaded, layers=layers)


async def measure(
    engine: OneEngine, questions: Questions, loaded: LoadedSubstitution | None, threshold: float
) -> Point:
    """Ask everything, one set after the other."""
    engine.degrade(loaded, threshold)
    told = {one.name: await engine.answer(one.asks) for one in questions.sets}
    read = await engine.answer(questions.windows)
    rows = {one.name: one.judge(told[one.name]) for one in questions.sets}
    return Point(rows, fmean(_degraded(each) for each in told.values()), cross_entropy(read))


async def is_exact_at_one(
    engine: OneEngine, asks: Sequence[Ask], exact: Sequence[Told], loaded: LoadedSubstitution
) -> bool:
    """Check that a substitution changes no bit of any answer at threshold 1."""
    engine.degrade(loaded, 1.0)
    told = await engine.answer(asks)
    same = [
        a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(told, exact, strict=True)
    ]
    return all(same) and _degraded(told) == 0


async def in_mixed_batches(
    engine: OneEngine, sets: Sequence[TaskSet], loaded: LoadedSubstitution, threshold: float
) -> tuple[Rows, float]:
    """Ask all sets together, in a drawn order: a batch holds rows of many. Returns as ``Point`` has them."""
    engine.degrade(loaded, threshold)
    asks = [ask for one in sets for ask in one.asks]
    order = random.Random("mixed").sample(range(len(asks)), len(asks))
    told = dict(zip(order, await engine.answer([asks[at] for at in order]), strict=True))
    rows, shares, start = {}, [], 0
    for one in sets:
        own = [told[start + at] for at in range(len(one.asks))]
        rows[one.name] = one.judge(own)
        shares.append(_degraded(own))
        start += len(one.asks)
    return rows, fmean(shares)


def _degraded(told: Sequence[Told]) -> float:
    rows = sum(each.degradation.rows for each in told)
    return sum(each.degradation.share * each.degradation.rows for each in told) / rows


@contextmanager
def _without_united(directory: Path) -> Iterator[Path]:
    """The same model in a directory without united experts."""
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as name:
        for file in directory.resolve().iterdir():
            if not file.name.startswith("united-way-"):
                (Path(name) / file.name).symlink_to(file)
        yield Path(name)
