"""Bodies of ``/v1/classify``, ``/v1/score``, ``/v1/rerank`` and ``/generative_scoring``: texts to judge."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from moesaic.classification.forms import MAX_LABELS
from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import (
    MAX_PROMPTS,
    TOKEN_IDS,
    AskingWire,
    BodyPart,
    InferenceWire,
    TokenId,
    as_list,
    is_text_or_ids,
)
from moesaic.services.gateway.fields.truncating import MEANING, KeptTokens

MAX_LABEL_TOKENS = 1000
_PAIRED = (
    ("queries", "documents"),
    ("text_1", "text_2"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
_TEXT_OR_IDS: Any = {"anyOf": [{"type": "string"}, TOKEN_IDS]}
Texts = str | list[str]


class LabelWire(BodyPart):
    """A label with its description."""

    label: str
    description: str | None = None


class ClassifyWire(AskingWire):
    """Body of ``/v1/classify``."""

    input: str | list[str]
    labels: (
        Annotated[
            list[str | LabelWire],
            # Too few are told from none, by the route.
            Field(max_length=MAX_LABELS, json_schema_extra={"minItems": 2}),
        ]
        | None
    ) = None
    instruction: str | None = Field(None, max_length=10_000)
    method: Literal["auto", "token", "choice", "sequence", "multi"] = "auto"
    top_k: int | None = Field(None, ge=1)

    @field_validator("input")
    @classmethod
    def _input_is_bounded(cls, value: str | list[str]) -> str | list[str]:
        if not 1 <= len(as_list(value)) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} texts, got {len(value)}")
        return value

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(as_list(self.input)) * (len(self.labels or ()) if self.method == "multi" else 1)


class Pairs(NamedTuple):
    """Texts to judge: each of ``documents`` by the one query, or by its own; ``fields`` name their places."""

    queries: list[str]
    documents: list[str]
    fields: list[str]


class ScoreWire(AskingWire):
    """Body of ``/v1/score``: one text and many, or as many of both; by whichever two names."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = Field(None, max_length=10_000)

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return max(len(as_list(getattr(self, second))) for _, second in _PAIRED)

    def pairs(self) -> "Pairs":
        """Pair both sides.

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


class DocumentWire(BodyPart):
    """A document as an object."""

    text: str


class RerankWire(AskingWire):
    """Body of ``/v1/rerank``."""

    query: str
    documents: list[str | DocumentWire] = Field(min_length=1, max_length=MAX_PROMPTS)
    top_n: int | None = Field(None, ge=0, description="number of results; 0: all")
    return_documents: bool | None = None
    instruction: str | None = Field(None, max_length=10_000)

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(self.documents)

    def pairs(self) -> Pairs:
        """Pair the query with each of the documents."""
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
    truncate_prompt_tokens: KeptTokens | None = Field(None, description=MEANING)

    # Checked by hand: a union of types reports every item once for each of them.
    @field_validator("query")
    @classmethod
    def _is_prompt(cls, query: Any) -> Any:
        if not is_text_or_ids(query):
            raise ValueError("must be a string or a list of token ids")
        return query

    @field_validator("items")
    @classmethod
    def _are_prompts(cls, items: Any) -> Any:
        if not isinstance(items, list) or not all(map(is_text_or_ids, items)):
            raise ValueError("must be a list of strings or of lists of token ids")
        if not 1 <= len(items) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} items, got {len(items)}")
        return items

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(self.items)
