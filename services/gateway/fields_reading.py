"""What callers may send to the routes that ask several questions at once: decisions, scores, ranks."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    field_validator,
    model_validator,
)

from moesaic.classification.decisions import Asked, Turn
from moesaic.classification.forms import Label
from moesaic.errors import InvalidInput
from services.gateway.fields import MAX_PROMPTS, InferenceWire, TextPart, TokenId, as_list
from services.gateway.formats import Part

MAX_LABEL_TOKENS = 1000
_TEXT_PARTS = ("text", "input_text", "output_text")
_PAIRED = (
    ("queries", "documents"),
    ("text_1", "text_2"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
_TOKEN_IDS: Any = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_OR_IDS: Any = {"anyOf": [{"type": "string"}, _TOKEN_IDS]}

Texts = str | Annotated[list[str], Field(fail_fast=True)]
Instructions = str | Annotated[list[TextPart], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=256)]


class Strict(BaseModel):
    """An object of ``/v1/decisions``: whatever it has besides is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class EvidenceWire(Strict):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: Instructions


class PredicateWire(Strict):
    """Is a statement about the input true?"""

    type: Literal["predicate"]
    instructions: Instructions
    name: Name | None = None


class OptionWire(Strict):
    """One value that may be chosen."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceWire(Strict):
    """Which of these values?"""

    type: Literal["choice"]
    instructions: Instructions
    choices: list[OptionWire] = Field(min_length=2, max_length=255)
    name: Name | None = None


class LevelWire(Strict):
    """One level of a scale."""

    label: str
    description: str | None = None


class GradeWire(Strict):
    """Which of these levels, from the lowest to the highest?"""

    type: Literal["score"]
    instructions: Instructions
    levels: list[LevelWire] = Field(min_length=2, max_length=10)
    name: Name | None = None


AnyQuestionWire = PredicateWire | ChoiceWire | GradeWire
QuestionWire = Annotated[AnyQuestionWire, Field(discriminator="type")]


class DecisionsWire(InferenceWire):
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

    def turns(self) -> list[Turn]:
        """The input as messages.

        Raises:
            InvalidInput: one has something other than text.
        """
        if isinstance(self.input, str):
            return [Turn("user", self.input)]
        return [
            Turn(message.role, _text(message.content, f"input[{i}].content"))
            for i, message in enumerate(self.input)
        ]


def asked_of(question: AnyQuestionWire, field: str) -> Asked:
    """A question without its wire format.

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
    """How a value is called in a prompt."""
    return value if isinstance(value, str) else str(value).lower()


class Pairs(NamedTuple):
    """Texts to judge: each of ``documents`` by the one query, or by its own; ``fields`` say where they stand."""

    queries: list[str]
    documents: list[str]
    fields: list[str]


class ScoreWire(InferenceWire):
    """Body of ``/v1/score``: one text and many, or as many of both; by whichever two names."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = Field(None, max_length=10_000)

    def pairs(self) -> "Pairs":
        """Both sides.

        Raises:
            InvalidInput: naming what to send, or the side to correct.
        """
        if "label_token_ids" in (self.model_extra or {}):
            fix = "belongs to /generative_scoring; here send queries and documents"
            raise InvalidInput("label_token_ids", fix)
        given = {name for pair in _PAIRED for name in pair if getattr(self, name) is not None}
        names = next((pair for pair in _PAIRED if given == set(pair)), None)
        if names is None:
            fix = ", or ".join(f"{first} and {second}" for first, second in _PAIRED)
            got = f"got {', '.join(sorted(given))}" if given else "got none of them"
            raise InvalidInput(min(given, default="queries"), f"send {fix}; {got}")
        first, second = (as_list(getattr(self, name)) for name in names)
        if not 1 <= len(second) <= MAX_PROMPTS:
            raise InvalidInput(names[1], f"must hold 1 to {MAX_PROMPTS} texts, got {len(second)}")
        if len(first) not in (1, len(second)):
            fix = f"must be one text or as many as {names[1]}, {len(second)}; got {len(first)}"
            raise InvalidInput(names[0], fix)
        is_one = isinstance(getattr(self, names[1]), str)
        fields = [names[1]] if is_one else [f"{names[1]}[{i}]" for i in range(len(second))]
        return Pairs(first, second, fields)


class DocumentWire(Part):
    """A document as an object."""

    text: str


class RerankWire(InferenceWire):
    """Body of ``/v1/rerank``."""

    query: str
    documents: list[str | DocumentWire] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(None, ge=0, description="how many to give; 0 for all")
    return_documents: bool | None = None
    instruction: str | None = Field(None, max_length=10_000)

    def pairs(self) -> Pairs:
        """The query with each of the documents."""
        texts = [d if isinstance(d, str) else d.text for d in self.documents]
        return Pairs([self.query], texts, [f"documents[{i}]" for i in range(len(texts))])


class GenerativeScoringWire(InferenceWire):
    """Body of ``/generative_scoring``: texts or token ids, put behind each other as they are."""

    query: Any = Field(..., json_schema_extra=_TEXT_OR_IDS)
    items: Any = Field(
        ..., json_schema_extra={"type": "array", "items": _TEXT_OR_IDS, "minItems": 1}
    )
    label_token_ids: list[TokenId] = Field(min_length=1, max_length=MAX_LABEL_TOKENS)
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True

    # Checked by hand: a union of types reports every item once for each of them.
    @field_validator("query")
    @classmethod
    def _is_prompt(cls, query: Any) -> Any:
        if not _is_text_or_ids(query):
            raise ValueError("must be a string or a list of token ids")
        return query

    @field_validator("items")
    @classmethod
    def _are_prompts(cls, items: Any) -> Any:
        if not isinstance(items, list) or not all(map(_is_text_or_ids, items)):
            raise ValueError("must be a list of strings or of lists of token ids")
        if not 1 <= len(items) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} items, got {len(items)}")
        return items


def _text(content: str | Sequence[TextPart], field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS or part.text is None:
            what = f"content of type {part.type[:40]!r} is not supported, only text"
            raise InvalidInput(field, what, code="unsupported_parameter")
    return "\n".join(part.text or "" for part in content)


def _is_text_or_ids(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
