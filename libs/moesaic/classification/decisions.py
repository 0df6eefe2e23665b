"""Decisions: questions about one input, each a read of its own, with the input as common prefix.

| Question | Asks | Read off |
|---|---|---|
| predicate | Is a statement true? | yes and no |
| choice | Which of these values? | the values themselves, or their letters |
| score | Which of these ordered levels? | the levels, or their numbers from 0; the mean is the score |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moesaic.classification.candidates import Candidates, Odds, Read, odds, yes_or_no
from moesaic.classification.dialogue import Dialogue
from moesaic.classification.forms import CHEAPEST_FIRST, Label, best_of, tidied
from moesaic.classification.prompts import SYMBOLS, Method, label_values
from moesaic.errors import InvalidInput

NUMBERS = "0123456789"
Kind = Literal["predicate", "choice", "score"]


class Asked(NamedTuple):
    """A question in its caller's words; a predicate has no options."""

    kind: Kind
    instructions: str
    options: Sequence[Label] = ()


class Turn(NamedTuple):
    """One message of an input."""

    role: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question in its normal form: the same for every input."""

    kind: Kind
    options: tuple[Label, ...]
    candidates: Candidates  # of the options, in their order; of a predicate yes, then no
    template: str
    instructions: str
    symbols: str
    dialogue: Dialogue

    def read(self, evidence: str) -> Read:
        """Ask the question about one input."""
        values = label_values([option.wording for option in self.options], self.symbols)
        words = self.dialogue.wording.render(
            self.template, input=evidence.strip(), instructions=self.instructions, **values
        )
        return Read(self.dialogue.ask(words), self.candidates)

    def odds(self, logprobs: Sequence[float]) -> Odds:
        """Compare the options, or yes and no, by a read's log-probabilities.

        Raises:
            ValueError: there is not one number per candidate.
        """
        if len(logprobs) != len(self.candidates):
            raise ValueError(f"expected {len(self.candidates)} log-probabilities, got {logprobs}")
        return odds(logprobs)


def put(
    dialogue: Dialogue, asked: Asked, field: str, auto: Sequence[Method] = CHEAPEST_FIRST
) -> Question:
    """Bring a question into its normal form.

    Args:
        dialogue: form of questions and answers of the model.
        asked: the question.
        field: its place in the request, for errors.
        auto: methods to name an option by; the first that works is taken (see ``forms.normal_form``).

    Raises:
        InvalidInput: its words are blank, or its options cannot be told apart.
    """
    instructions = asked.instructions.strip()
    if not instructions:
        raise InvalidInput(f"{field}.instructions", "must not be blank")
    if asked.kind == "predicate":
        candidates = yes_or_no(dialogue)
        return Question("predicate", (), candidates, "predicate", instructions, "", dialogue)
    name = "choices" if asked.kind == "choice" else "levels"
    symbols, by_symbol = (
        (SYMBOLS, "decide_by_letter") if asked.kind == "choice" else (NUMBERS, "decide_by_number")
    )
    options = tidied(asked.options, f"{field}.{name}", least=2)
    try:
        names = [option.name for option in options]
        method, candidates = best_of(dialogue, names, auto, symbols)
    except InvalidInput as error:
        raise InvalidInput(f"{field}.{name}", error.fix) from error
    template = by_symbol if method == "choice" else "decide"
    return Question(
        asked.kind, tuple(options), candidates, template, instructions, symbols, dialogue
    )


def mean_level(shares: Sequence[float]) -> float:
    """Average the levels 0, 1, 2 … by these shares: the score."""
    return math.fsum(level * share for level, share in enumerate(shares))


def evidence_of(turns: Sequence[Turn]) -> str:
    """Write a conversation as one text; a single message of the user's is just its text."""
    if len(turns) == 1 and turns[0].role == "user":
        return turns[0].text
    return "\n\n".join(f"{turn.role.capitalize()}: {turn.text.strip()}" for turn in turns)
