"""How a model's chat template frames an answer: what precedes it, what ends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.classification.wording import PACKAGED, Wording

_PROBE = "x"


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
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
    with. ``controls`` are texts that the tokenizer takes as control tokens: in a question they are
    broken by a space, or whoever writes a text could end the turn in it and answer himself.
    """

    tokenizer: Encoder
    template: Template | None
    lead: str
    end_token_ids: tuple[int, ...]
    wording: Wording = PACKAGED
    controls: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tokenizer: Encoder,
        template: Template | None,
        eos_token_ids: Sequence[int],
        wording: Wording = PACKAGED,
        controls: Sequence[str] = (),
    ) -> "Dialogue":
        """Find out how answers begin and end; without a template they follow the wording's
        ``tail`` and a space."""
        if template is None:
            return cls(tokenizer, None, " ", tuple(eos_token_ids[:1]), wording, tuple(controls))
        asked = template.render([_turn("user")], add_generation_prompt=True)
        answered = template.render(
            [_turn("user"), {"role": "assistant", "content": _PROBE}], add_generation_prompt=False
        )
        start = answered.rfind(_PROBE)
        between = answered[len(asked) : start] if answered.startswith(asked) else ""
        ending = tokenizer.encode(answered[start + len(_PROBE) :], add_special_tokens=False)
        ends = [token_id for token_id in ending if token_id in eos_token_ids] or [*eos_token_ids]
        # A template may fill the turn with more than blank space (an empty chain of thought, say); that is not
        # part of a label.
        lead = between if between.isspace() else ""
        return cls(tokenizer, template, lead, tuple(ends[:1]), wording, tuple(controls))

    def ask(self, question: str) -> list[int]:
        """Token ids of a user turn up to where the answer starts."""
        if self.template is None:
            return self.tokenizer.encode(self._asked(question), add_special_tokens=True)
        return self.tokenizer.encode(self._asked(question), add_special_tokens=False)

    def continuation(self, answer: str) -> tuple[int, ...]:
        """Token ids of an answer where it stands: right behind the end of a question."""
        before = self._asked(_PROBE)
        start = self.tokenizer.encode(before, add_special_tokens=False)
        answer = self._harmless(answer)
        whole = self.tokenizer.encode(before + self.lead + answer, add_special_tokens=False)
        if whole[: len(start)] == start:
            return tuple(whole[len(start) :])
        # The answer's first letters would merge into the question's last token, which is fixed by then.
        return tuple(self.tokenizer.encode(self.lead + answer, add_special_tokens=False))

    def _harmless(self, text: str) -> str:
        for control in self.controls:
            text = text.replace(control, f"{control[0]} {control[1:]}")
        return text

    def _asked(self, question: str) -> str:
        question = self._harmless(question)
        if self.template is None:
            return question + self.wording.words["tail"]
        messages = [{"role": "user", "content": question}]
        return self.template.render(messages, add_generation_prompt=True)


def _turn(role: str) -> dict[str, str]:
    return {"role": role, "content": "?"}
