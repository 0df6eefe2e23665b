"""How a model's chat template frames an answer: what precedes it, what ends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.classification.wording import PACKAGED, Wording

_PROBE = "x"


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode_parted(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; what went through ``parted`` has no control tokens."""
        ...

    def parted(self, text: str) -> str:
        """A caller's text, so that none of it becomes a control token."""
        ...


class Template(Protocol):
    """What is needed of a chat template."""

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
        """The text of a conversation."""
        ...


@dataclass(frozen=True)
class Dialogue:
    """A model's way of asking and answering, learned once from its tokenizer and template.

    ``lead`` is the blank space that the model puts before an answer; ``end_token_ids`` ends its
    turn (one token, or none if the model has no such token); ``wording`` has the words it is asked
    with. Questions and answers are text, whatever they spell: who writes a text cannot end the turn
    in it and answer himself.
    """

    tokenizer: Encoder
    template: Template | None
    lead: str
    end_token_ids: tuple[int, ...]
    wording: Wording = PACKAGED

    @classmethod
    def of(
        cls,
        tokenizer: Encoder,
        template: Template | None,
        eos_token_ids: Sequence[int],
        wording: Wording = PACKAGED,
    ) -> "Dialogue":
        """Find out how answers begin and end; without a template they follow the wording's
        ``tail`` and a space."""
        if template is None:
            return cls(tokenizer, None, " ", tuple(eos_token_ids[:1]), wording)
        asked = template.render([_turn("user")], add_generation_prompt=True)
        answered = template.render(
            [_turn("user"), {"role": "assistant", "content": _PROBE}], add_generation_prompt=False
        )
        start = answered.rfind(_PROBE)
        between = answered[len(asked) : start] if answered.startswith(asked) else ""
        ending = tokenizer.encode_parted(answered[start + len(_PROBE) :], add_special_tokens=False)
        ends = [token_id for token_id in ending if token_id in eos_token_ids] or [*eos_token_ids]
        # A template may fill the turn with more than blank space (an empty chain of thought, say); that is not
        # part of a label.
        lead = between if between.isspace() else ""
        return cls(tokenizer, template, lead, tuple(ends[:1]), wording)

    def ask(self, question: str) -> list[int]:
        """Token ids of a user turn up to where the answer starts."""
        special = self.template is None
        return self.tokenizer.encode_parted(self._asked(question), add_special_tokens=special)

    def continuation(self, answer: str) -> tuple[int, ...]:
        """Token ids of an answer where it stands: right behind the end of a question."""
        before = self._asked(_PROBE)
        start = self.tokenizer.encode_parted(before, add_special_tokens=False)
        answer = self.lead + self.tokenizer.parted(answer)
        whole = self.tokenizer.encode_parted(before + answer, add_special_tokens=False)
        if whole[: len(start)] == start:
            return tuple(whole[len(start) :])
        # The answer's first letters would merge into the question's last token, which is fixed by then.
        return tuple(self.tokenizer.encode_parted(answer, add_special_tokens=False))

    def _asked(self, question: str) -> str:
        question = self.tokenizer.parted(question)
        if self.template is None:
            return question + self.wording.words["tail"]
        messages = [{"role": "user", "content": question}]
        return self.template.render(messages, add_generation_prompt=True)


def _turn(role: str) -> dict[str, str]:
    return {"role": role, "content": "?"}
