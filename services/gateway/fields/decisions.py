"""Body of ``/v1/decisions``: one input, and questions about it."""

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)

from moesaic.classification.decisions import Asked, Turn
from moesaic.classification.forms import Label
from moesaic.services.gateway.fields.bodies import AskingWire, Bounded, TextPart, checked_texts

Instructions = str | list[TextPart]
Name = Annotated[str, Field(max_length=256)]


class Strict(Bounded):
    """An object of ``/v1/decisions``: any other field in it is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class EvidenceWire(Strict):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: Instructions


class PredicateWire(Strict):
    """Question for the truth of a statement about the input."""

    type: Literal["predicate"]
    instructions: Instructions
    name: Name | None = None


class OptionWire(Strict):
    """One value that may be chosen."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceWire(Strict):
    """Question for one of some values."""

    type: Literal["choice"]
    instructions: Instructions
    choices: list[OptionWire] = Field(min_length=2, max_length=255)
    name: Name | None = None


class LevelWire(Strict):
    """One level of a scale."""

    label: str
    description: str | None = None


class GradeWire(Strict):
    """Question for one of some levels, from the lowest to the highest."""

    type: Literal["score"]
    instructions: Instructions
    levels: list[LevelWire] = Field(min_length=2, max_length=10)
    name: Name | None = None


AnyQuestionWire = PredicateWire | ChoiceWire | GradeWire
QuestionWire = Annotated[AnyQuestionWire, Field(discriminator="type")]


class DecisionsWire(AskingWire):
    """Body of ``/v1/decisions``."""

    model_config = ConfigDict(extra="forbid")

    input: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[EvidenceWire], Field(min_length=1, max_length=4096), Tag("list[message]")],
        Discriminator(lambda value: "str" if isinstance(value, str) else "list[message]"),
    ]
    questions: list[QuestionWire] = Field(min_length=1, max_length=400)
    safety_identifier: str | None = Field(None, max_length=128)
    prompt_cache_key: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        description="the same as cache_salt, which wins",
    )
    prompt_cache_options: dict[str, Any] | None = Field(
        None, description="taken and not needed: prefixes are always cached"
    )

    @model_validator(mode="after")
    def _key_is_salt(self) -> "DecisionsWire":
        self.cache_salt = self.cache_salt or self.prompt_cache_key
        return self

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(self.questions)

    def turns(self) -> list[Turn]:
        """Read the input as messages.

        Raises:
            InvalidInput: a message has something other than text.
        """
        if isinstance(self.input, str):
            return [Turn("user", self.input)]
        return [
            Turn(message.role, _text(message.content, f"input[{i}].content"))
            for i, message in enumerate(self.input)
        ]


def asked_of(question: AnyQuestionWire, field: str) -> Asked:
    """Take a question out of its wire format.

    Raises:
        InvalidInput: its instructions have something other than text.
    """
    instructions = _text(question.instructions, f"{field}.instructions")
    if isinstance(question, ChoiceWire):
        options = [Label(named(o.value), o.description or "") for o in question.choices]
    elif isinstance(question, GradeWire):
        options = [Label(level.label, level.description or "") for level in question.levels]
    else:
        options = []
    return Asked(question.type, instructions, options)


def named(value: str | bool) -> str:
    """Name a value for a prompt."""
    return value if isinstance(value, str) else str(value).lower()


def _text(content: Instructions, field: str) -> str:
    texts = checked_texts(content, field)
    return texts if isinstance(texts, str) else "\n".join(texts)
