"""Candidates: the possible answers as tokens, and their odds by the model's log-probabilities."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.classification.dialogue import Dialogue
from moesaic.errors import InvalidInput

Candidates = tuple[tuple[int, ...], ...]
MAX_ANSWER_TOKENS = 256  # of one candidate: engines take no longer ones


class Read(NamedTuple):
    """The operation that every question is made of (MoE-Prefill, section 3).

    One prefill gives the log-probability of each candidate after the prompt.
    """

    prompt: Sequence[int]
    candidates: Candidates


class Odds(NamedTuple):
    """Odds that one read gives.

    Attributes:
        shares: probability of each candidate among all, in order; they sum to 1.
        mass: probability of all candidates together, among the whole vocabulary, 0..1.
    """

    shares: list[float]
    mass: float


def one_token_each(
    dialogue: Dialogue, names: Sequence[str], method: str, others: str
) -> Candidates:
    """Find the one token of each name where an answer starts.

    Raises:
        InvalidInput: a name takes more; ``others`` are the methods for such names.
    """
    candidates = tuple(dialogue.continuation(name) for name in names)
    for name, candidate in zip(names, candidates, strict=True):
        if len(candidate) != 1:
            raise InvalidInput(
                "method",
                f"{method} needs one token per label, {short(name)} takes {len(candidate)}; "
                f"use {others}",
            )
    return _told_apart(names, candidates)


def whole_answers(dialogue: Dialogue, names: Sequence[str]) -> Candidates:
    """Find all tokens of each name and the end of the turn.

    With the end, no name wins by being the beginning of another.

    Raises:
        InvalidInput: two names are the same tokens, or one has too many.
    """
    ends = dialogue.end_token_ids
    candidates = tuple((*dialogue.continuation(name), *ends) for name in names)
    for name, candidate in zip(names, candidates, strict=True):
        if len(candidate) > MAX_ANSWER_TOKENS:
            fix = f"{short(name)} takes {len(candidate)} tokens, at most {MAX_ANSWER_TOKENS} are scored"
            raise InvalidInput(
                "labels", f"{fix}: use method choice, or a short name and a description"
            )
    return _told_apart(names, candidates)


def yes_or_no(dialogue: Dialogue) -> Candidates:
    """Find yes, then no: by their tokens if they have one each, else whole."""
    names = [dialogue.wording.words["yes"], dialogue.wording.words["no"]]
    try:
        return one_token_each(dialogue, names, "a question for yes or no", "other words")
    except InvalidInput:
        return whole_answers(dialogue, names)


def odds(logprobs: Sequence[float]) -> Odds:
    """Compare the candidates of one read by their log-probabilities (natural log).

    Raises:
        ValueError: there is no candidate, or a log-probability is not a number.
    """
    if not logprobs or any(math.isnan(value) for value in logprobs):
        raise ValueError(f"expected log-probabilities, got {list(logprobs)}")
    peak = max(logprobs)
    # If no candidate has any probability, nothing tells them apart.
    weights = [1.0 if math.isinf(peak) else math.exp(value - peak) for value in logprobs]
    total = math.fsum(weights)
    mass = min(1.0, math.fsum(math.exp(value) for value in logprobs))
    return Odds([weight / total for weight in weights], mass)


def short(name: str) -> str:
    """Quote a name for an error."""
    return repr(name if len(name) <= 60 else name[:57] + "...")


def _told_apart(names: Sequence[str], candidates: Candidates) -> Candidates:
    first: dict[tuple[int, ...], str] = {}
    for name, candidate in zip(names, candidates, strict=True):
        if candidate in first:
            raise InvalidInput(
                "labels",
                f"{short(first[candidate])} and {short(name)} are the same to this model; "
                "use method choice, or other names",
            )
        first[candidate] = name
    return candidates
