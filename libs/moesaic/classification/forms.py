"""The normal forms of a classification (MoE-Prefill, section 3): one prefill, no decoding.

| Method | Candidates |
|---|---|
| ``token`` | each label's one token where the answer starts |
| ``choice`` | the token of each label's letter, which the prompt gives it |
| ``sequence`` | all tokens of each label, and the end of the turn |
| ``multi`` | yes and no, in a question of its own for each label |

The end of the turn in ``sequence`` keeps a label from winning as the beginning of another. The questions of ``multi``
share the text as their prefix, and their probabilities do not depend on each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.classification.candidates import (
    Candidates,
    Read,
    odds,
    one_token_each,
    short,
    whole_answers,
    yes_or_no,
)
from moesaic.classification.dialogue import Dialogue
from moesaic.classification.prompts import SYMBOLS, Method, question
from moesaic.errors import InvalidInput

MAX_LABELS = 1000
CHEAPEST_FIRST: tuple[Method, ...] = ("token", "choice", "sequence")


class Label(NamedTuple):
    """One answer that the caller allows."""

    name: str
    description: str = ""

    @property
    def wording(self) -> str:
        """The label as the prompt states it."""
        return f"{self.name} ({self.description})" if self.description else self.name


@dataclass(frozen=True)
class Form:
    """A task in its normal form: the same for every text that is to be classified."""

    method: Method
    labels: tuple[Label, ...]
    candidates: Candidates  # of each read: the labels' answers in their order; for multi yes and no
    instruction: str
    dialogue: Dialogue

    @property
    def num_reads(self) -> int:
        """Reads of one text."""
        return len(self.labels) if self.method == "multi" else 1

    def reads(self, text: str) -> Iterator[Read]:
        """Ask about one text: one read, or for ``multi`` one for each label, in their order."""
        words = [label.wording for label in self.labels]
        for asked in [[word] for word in words] if self.method == "multi" else [words]:
            yield Read(self._prompt(text, asked), self.candidates)

    def _prompt(self, text: str, labels: Sequence[str]) -> list[int]:
        wording = self.dialogue.wording
        return self.dialogue.ask(question(text, labels, self.instruction, self.method, wording))


class ScoredLabel(NamedTuple):
    """One label with its log-probability and its share among the labels.

    For ``multi`` both belong to yes, and ``label_mass`` to the label's own read.
    """

    label: str
    logprob: float
    prob: float
    label_mass: float | None = None


@dataclass(frozen=True)
class Classification:
    """The model's answer for one text.

    Attributes:
        label: the most likely label.
        probs: probabilities in the order of the request's labels.
        ranked: labels, the most likely first.
        label_mass: probability of all candidates together, among the whole vocabulary, 0..1; the least of the reads.
    """

    label: str
    probs: list[float]
    ranked: list[ScoredLabel]
    label_mass: float


def normal_form(
    dialogue: Dialogue,
    labels: Sequence[Label],
    instruction: str | None = None,
    method: Literal["auto"] | Method = "auto",
    auto: Sequence[Method] = CHEAPEST_FIRST,
) -> Form:
    """Choose the normal form, and find the candidates as exact tokens.

    ``auto`` takes the first method of ``auto`` that can tell the labels apart; small models do
    better without ``choice``, which asks them to look a letter up.

    Raises:
        InvalidInput: the labels are unusable, or ``method`` cannot tell them apart.
    """
    labels = tidied(labels, "labels", least=1 if method == "multi" else 2)
    instruction = (instruction or "").strip() or dialogue.wording.words["instruction"]
    if method == "auto":
        chosen, candidates = best_of(dialogue, [label.name for label in labels], auto, SYMBOLS)
    elif method == "multi":
        chosen, candidates = method, yes_or_no(dialogue)
    else:
        names = [label.name for label in labels]
        chosen, candidates = method, candidates_of(dialogue, names, method, SYMBOLS)
    return Form(chosen, tuple(labels), candidates, instruction, dialogue)


def assemble(
    form: Form, reads: Sequence[Sequence[float]], top_k: int | None = None
) -> Classification:
    """Read an answer off the log-probabilities (natural log) that each read gave its candidates.

    Ties go to the earlier label.

    Raises:
        ValueError: there is not one number per candidate.
    """
    if [len(read) for read in reads] != [len(form.candidates)] * form.num_reads:
        raise ValueError(
            f"expected {len(form.candidates)} log-probabilities {form.num_reads} times, got {reads}"
        )
    told = [odds(read) for read in reads]
    if form.method == "multi":
        masses: list[float] = [mass for _, mass in told]
        probs = [shares[0] for shares, _ in told]
        scored = [
            ScoredLabel(label.name, read[0], prob, mass)
            for label, read, prob, mass in zip(form.labels, reads, probs, masses, strict=True)
        ]
    else:
        [(probs, mass)] = told
        masses = [mass]
        scored = [
            ScoredLabel(label.name, logprob, prob)
            for label, logprob, prob in zip(form.labels, reads[0], probs, strict=True)
        ]
    # By share, which many labels may have as 0 or 1, then by log-probability; stable: the earlier label first.
    ranked = sorted(scored, key=lambda label: (-label.prob, -label.logprob))
    return Classification(ranked[0].label, probs, ranked[:top_k], min(masses))


def tidied(labels: Sequence[Label], field: str, least: int) -> list[Label]:
    """Strip the labels of blank space around them.

    Raises:
        InvalidInput: ``field`` has fewer than ``least`` labels or too many, a blank one, or the same one twice.
    """
    tidy = [Label(label.name.strip(), label.description.strip()) for label in labels]
    if not least <= len(tidy) <= MAX_LABELS:
        raise InvalidInput(field, f"must hold {least} to {MAX_LABELS} labels, got {len(tidy)}")
    seen: set[str] = set()
    for i, (name, _) in enumerate(tidy):
        if not name:
            raise InvalidInput(f"{field}[{i}]", "must not be blank")
        if name in seen:
            raise InvalidInput(f"{field}[{i}]", f"must be unique; {short(name)} appears twice")
        seen.add(name)
    return tidy


def best_of(
    dialogue: Dialogue, names: Sequence[str], order: Sequence[Method], symbols: str
) -> tuple[Method, Candidates]:
    """Find the first method that works, with its candidates.

    Raises:
        InvalidInput: no method works.
    """
    for method in order[:-1]:
        try:
            return method, candidates_of(dialogue, names, method, symbols)
        except InvalidInput:
            continue
    return order[-1], candidates_of(dialogue, names, order[-1], symbols)


def candidates_of(
    dialogue: Dialogue, names: Sequence[str], method: Method, symbols: str
) -> Candidates:
    """Find the answers that name one of ``names``; ``symbols`` stand for them in ``choice``.

    Raises:
        InvalidInput: ``method`` cannot tell the names apart.
    """
    if method == "sequence":
        return whole_answers(dialogue, names)
    if method == "token":
        return one_token_each(dialogue, names, method, "choice or sequence")
    if len(names) > len(symbols):
        raise InvalidInput(
            "method",
            f"choice takes at most {len(symbols)} labels, got {len(names)}; use sequence",
        )
    return one_token_each(dialogue, symbols[: len(names)], method, "sequence")
