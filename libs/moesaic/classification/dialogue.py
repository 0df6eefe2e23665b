"""The frame that a model's chat template puts around an answer: its lead and its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from moesaic.classification.wording import PACKAGED, Wording

_PROBE = "x"
_ANSWER = "probe_answer"  # in the text of no template


class Encoder(Protocol):
    """The part of a tokenizer that a dialogue needs."""

    def encode_parted(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text; a part that went through ``parted`` has no control tokens."""
        ...

    def parted(self, text: str) -> str:
        """Split a caller's text, so that none of it becomes a control token."""
        ...


class Template(Protocol):
    """The part of a chat template that a dialogue needs."""

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
        """Write a conversation as text."""
        ...


@dataclass(frozen=True)
class Dialogue:
    """The form of questions and answers of a model, learned once from its tokenizer and template.

    Questions and answers are plain text, without control tokens: the author of a text cannot end
    the turn and answer himself.

    Attributes:
        opening: text of the template between a question and its answer, such as an empty chain of thought.
        lead: blank space that the model puts before an answer.
        end_token_ids: the end of its turn: one token, or none if the model has no such token.
        wording: the words of its questions.
    """

    tokenizer: Encoder
    template: Template | None
    lead: str
    end_token_ids: tuple[int, ...]
    wording: Wording = PACKAGED
    opening: str = ""

    @classmethod
    def of(
        cls,
        tokenizer: Encoder,
        template: Template | None,
        eos_token_ids: Sequence[int],
        wording: Wording = PACKAGED,
        closing: Callable[[str], str | None] = lambda prompt: None,
    ) -> "Dialogue":
        """Learn the lead and the end of answers.

        Without a template, answers follow the wording's ``tail`` and a space.

        Args:
            tokenizer, template: those of the model.
            eos_token_ids: its end tokens.
            wording: the words of its questions.
            closing: returns the text that ends a prompt's open reasoning; empty: it is closed; None: there is none.
        """
        if template is None:
            return cls(tokenizer, None, " ", tuple(eos_token_ids[:1]), wording)
        asked = template.render([_turn("user")], add_generation_prompt=True)
        answered = template.render(
            [_turn("user"), {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False
        )
        before, _, after = answered.rpartition(_ANSWER)
        ending = tokenizer.encode_parted(after, add_special_tokens=False)
        ends = [token_id for token_id in ending if token_id in eos_token_ids] or [*eos_token_ids]
        between = before[len(asked) :] if before.startswith(asked) else ""
        # A template may write an answer more than once.
        between = between.partition(_ANSWER)[0]
        close = closing(asked)
        if between.isspace() and close is None:
            return cls(tokenizer, template, between, tuple(ends[:1]), wording)
        # If the template itself writes text before an answer, nothing else may end the reasoning.
        opening = between if between.strip() or not close else close
        lead = " " if opening.endswith(" ") else ""
        opening = opening.removesuffix(lead)
        return cls(tokenizer, template, lead, tuple(ends[:1]), wording, opening)

    def ask(self, question: str) -> list[int]:
        """Encode a user turn, up to the start of the answer."""
        special = self.template is None
        return self.tokenizer.encode_parted(self._asked(question), add_special_tokens=special)

    def continuation(self, answer: str) -> tuple[int, ...]:
        """Encode an answer in its place: right after the end of a question."""
        before, start = self._before
        answer = self.lead + self.tokenizer.parted(answer)
        whole = self.tokenizer.encode_parted(before + answer, add_special_tokens=False)
        if whole[: len(start)] == start:
            return tuple(whole[len(start) :])
        # The answer's first letters would merge into the question's last token, which is fixed by then.
        return tuple(self.tokenizer.encode_parted(answer, add_special_tokens=False))

    @cached_property
    def _before(self) -> tuple[str, list[int]]:
        """A question, and its tokens; rendered once, as there may be a thousand answers."""
        asked = self._asked(_PROBE)
        return asked, self.tokenizer.encode_parted(asked, add_special_tokens=False)

    def _asked(self, question: str) -> str:
        question = self.tokenizer.parted(question)
        if self.template is None:
            return question + self.wording.words["tail"]
        messages = [{"role": "user", "content": question}]
        return self.template.render(messages, add_generation_prompt=True) + self.opening


def _turn(role: str) -> dict[str, str]:
    return {"role": role, "content": "?"}
