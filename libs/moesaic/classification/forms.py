"""The normal forms of a classification (MoE-Prefill, section 3): one prefill, no decoding.

* ``token``: every label is one token where the answer starts. * ``choice``: each label has a letter
in the prompt, the answer is the letter's token. * ``sequence``: a label is scored by the
log-probability of all its tokens and of the end of the turn, so that no label wins by being the
beginning of another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.classification.dialogue import Dialogue
from moesaic.classification.prompts import DEFAULT_INSTRUCTION, SYMBOLS, Method, question
from moesaic.errors import InvalidInput

MAX_LABELS = 1000
CHEAPEST_FIRST: tuple[Method, ...] = ("token", "choice", "sequence")
Candidates = tuple[tuple[int, ...], ...]


class Label(NamedTuple):
    """One answer that the caller allows."""

    name: str
    description: str = ""

    @property
    def wording(self) -> str:
        """How the prompt states it."""
        return f"{self.name} ({self.description})" if self.description else self.name


@dataclass(frozen=True)
class Form:
    """A task in its normal form: the same for every text that is to be classified."""

    method: Method
    labels: tuple[Label, ...]
    candidates: Candidates  # token ids of each label's answer, in the order of the labels
    instruction: str
    dialogue: Dialogue

    def prompt(self, text: str) -> list[int]:
        """Token ids of the whole prompt for one text."""
        words = [label.wording for label in self.labels]
        return self.dialogue.ask(question(text, words, self.instruction, self.method))


class ScoredLabel(NamedTuple):
    """One label with its log-probability and its share among the labels."""

    label: str
    logprob: float
    prob: float


@dataclass(frozen=True)
class Classification:
    """What the model answered. ``probs`` is in the order of the request's labels, ``ranked`` most
    likely first."""

    label: str
    probs: list[float]
    ranked: list[ScoredLabel]
    label_mass: float  # probability that the whole vocabulary gave to all candidates together, 0..1


def plan(
    dialogue: Dialogue,
    labels: Sequence[Label],
    instruction: str | None = None,
    method: Literal["auto", "token", "choice", "sequence"] = "auto",
    auto: Sequence[Method] = CHEAPEST_FIRST,
) -> Form:
    """Choose the normal form and work out the token-exact candidates.

    ``auto`` takes the first method of ``auto`` that can tell the labels apart; small models do
    better without ``choice``, which asks them to look a letter up.

    Raises:
        InvalidInput: the labels are unusable, or ``method`` cannot tell them apart.
    """
    labels = [Label(label.name.strip(), label.description.strip()) for label in labels]
    _check(labels)
    instruction = (instruction or "").strip() or DEFAULT_INSTRUCTION
    if method == "auto":
        chosen, candidates = _best(dialogue, labels, auto)
    else:
        chosen, candidates = method, _candidates(dialogue, labels, method)
    return Form(chosen, tuple(labels), candidates, instruction, dialogue)


def assemble(form: Form, logprobs: Sequence[float], top_k: int | None = None) -> Classification:
    """Read an answer off the candidates' log-probabilities (natural log); ties go to the earlier
    label.

    Raises:
        ValueError: there is not one number per label.
    """
    if len(logprobs) != len(form.labels) or any(math.isnan(value) for value in logprobs):
        raise ValueError(f"expected {len(form.labels)} log-probabilities, got {list(logprobs)}")
    peak = max(logprobs)
    # If no candidate has any probability, nothing tells them apart.
    weights = [1.0 if math.isinf(peak) else math.exp(value - peak) for value in logprobs]
    total = math.fsum(weights)
    probs = [weight / total for weight in weights]
    order = sorted(range(len(probs)), key=lambda i: -logprobs[i])  # stable: the earlier label first
    ranked = [ScoredLabel(form.labels[i].name, logprobs[i], probs[i]) for i in order[:top_k]]
    mass = min(1.0, math.fsum(math.exp(value) for value in logprobs))
    return Classification(form.labels[order[0]].name, probs, ranked, mass)


def _check(labels: Sequence[Label]) -> None:
    if not 2 <= len(labels) <= MAX_LABELS:
        raise InvalidInput("labels", f"must hold 2 to {MAX_LABELS} labels, got {len(labels)}")
    seen: set[str] = set()
    for i, (name, _) in enumerate(labels):
        if not name:
            raise InvalidInput(f"labels[{i}]", "must not be blank")
        if name in seen:
            raise InvalidInput(f"labels[{i}]", f"must be unique, {_short(name)} is there already")
        seen.add(name)


def _best(
    dialogue: Dialogue, labels: Sequence[Label], order: Sequence[Method]
) -> tuple[Method, Candidates]:
    """The first form that works."""
    for method in order[:-1]:
        try:
            return method, _candidates(dialogue, labels, method)
        except InvalidInput:
            continue
    return order[-1], _candidates(dialogue, labels, order[-1])


def _candidates(dialogue: Dialogue, labels: Sequence[Label], method: Method) -> Candidates:
    if method == "choice" and len(labels) > len(SYMBOLS):
        raise InvalidInput(
            "method", f"choice takes at most {len(SYMBOLS)} labels, got {len(labels)}; use sequence"
        )
    names = [label.name for label in labels] if method != "choice" else SYMBOLS[: len(labels)]
    end = dialogue.end_token_ids if method == "sequence" else ()
    candidates = tuple((*dialogue.continuation(name), *end) for name in names)
    if method != "sequence":
        for name, candidate in zip(names, candidates, strict=True):
            if len(candidate) != 1:
                raise InvalidInput(
                    "method",
                    f"{method} needs one token per label, {_short(name)} takes {len(candidate)}; "
                    f"use {'choice or sequence' if method == 'token' else 'sequence'}",
                )
    first: dict[tuple[int, ...], str] = {}
    for name, candidate in zip(names, candidates, strict=True):
        if candidate in first:
            raise InvalidInput(
                "labels",
                f"{_short(first[candidate])} and {_short(name)} are the same to this model; "
                "use method choice, or other names",
            )
        first[candidate] = name
    return candidates


def _short(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
