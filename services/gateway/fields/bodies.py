"""Fields that bodies of several routes share, and the rules that hold for every body.

A field of a body that is in none of these modules changes the answer and is refused, or is passed over and named
(``unsupported``).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.formats import BodyPart

MAX_PROMPTS = 1024
_TEXT_PARTS = ("text", "input_text", "output_text")
NULL_IS_DEFAULT = {
    *("moesaic", "min_tokens", "n", "stop_token_ids", "ignore_eos", "stream"),
    *("skip_special_tokens", "include_stop_str_in_output"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}

TOKEN_IDS: Any = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenKey = Annotated[int, BeforeValidator(lambda key: _number_of(key)), Field(ge=0, lt=1 << 32)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def _allow_null(schema: dict[str, Any]) -> None:
    """Describe that ``null`` means the default."""
    properties = schema.get("properties", {})
    for name in NULL_IS_DEFAULT & properties.keys():
        told = properties[name]
        kept = {key: told.pop(key) for key in ("title", "description", "default") if key in told}
        properties[name] = {"anyOf": [told, {"type": "null"}], **kept}


class RequestBody(BodyPart):
    """Base of every request body."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_allow_null)

    model: str | None = Field(None, description="name of the served model")


class Extension(BodyPart):
    """The ``moesaic`` object of a request; other fields are refused."""

    quality: Literal["standard", "exact"] = Field(
        "standard",
        description="exact: no expert's work is left to another, however much there is to do; such a "
        "request may wait, or be refused with 503",
    )
    min_threshold: float = Field(
        0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="share of the choices of experts that experts serve themselves, at least, while others are "
        "degraded; 1 is quality exact",
    )
    deadline_ms: int | None = Field(None, ge=1, le=86_400_000)
    priority: Priority = 0
    provenance: bool = False
    site: str = Field(
        "",
        max_length=64,
        description="edge agents: the site whose agent answers, as long as it takes requests; default: that of "
        "the header X-Moesaic-Site, then that of the gateway",
    )
    store_kv: bool | None = Field(
        None,
        description="false: score without keeping the KV of the prompt, and without looking for any; "
        "default: as the workers are set up. Of no effect on generations, which need it",
    )

    @property
    def least_threshold(self) -> float:
        """The threshold that the request accepts; 1: exact."""
        return 1.0 if self.quality == "exact" else self.min_threshold


class InferenceWire(RequestBody):
    """Fields of every inference route."""

    user: str | None = None
    request_id: str | None = None
    priority: Priority | None = Field(None, description="lower values go first; default: 0")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        description="only requests with the same salt share computed prefixes",
    )
    moesaic: Extension = Field(default_factory=lambda: Extension.model_validate({}))

    @field_validator("moesaic", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @property
    def num_runs(self) -> int:
        """Count what workers are asked for, at least, before any of it is made."""
        return 1


class AskingWire(InferenceWire):
    """Fields of the routes that ask the model questions in words of their own."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="for the chat template; by default, reasoning is off if the template can turn it off",
    )


class TextPart(BodyPart):
    """One part of a message's content."""

    type: str
    text: str | None = None


def checked_texts(content: str | Sequence[TextPart], field: str) -> str | list[str]:
    """Give a content that is text, or the texts of its parts.

    Raises:
        InvalidInput: a part is no text, or has none; names ``field``.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in _TEXT_PARTS:
            what = f"content of type {part.type[:40]!r} is not supported, only text"
            raise InvalidInput(field, what, code="unsupported_parameter")
        if part.text is None:
            raise InvalidInput(field, f"a part of type {part.type!r} needs the field text")
        texts.append(part.text)
    return texts


def as_list(value: str | list[str] | None) -> list[str]:
    """Make a list of one, many or none."""
    return [value] if isinstance(value, str) else value or []


def is_text_or_ids(value: Any) -> bool:
    """Tell a prompt, a text or token ids, from everything else that JSON can say."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _number_of(key: Any) -> Any:
    """Read the number that a member's name spells, if it is one: JSON has only texts there."""
    plain = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if plain else key
