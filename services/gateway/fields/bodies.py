"""Fields that bodies of several routes share, and the rules that hold for every body.

Unknown fields are refused by name if they would change the answer, and else are ignored and named (``check_extras``).

To check an object stops soon after its first errors (``Bounded``). The validator would report every error, and half a
million reports take ten seconds. So a list is left at its first wrong item, and of members beyond what an object may
have, one is looked at. Between two items that are objects the event loop gets the interpreter, if it waits for it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, cast

import structlog
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_validator,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function as before

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.known import ONLY_KNOWN, REFUSED, WITHIN, Refusal

_QUICK = ("int", "str", "float", "any", None)
AllowedTexts = Annotated[list[str], Field(min_length=1, max_length=1024)]
Schema = dict[str, Any] | bool | str  # a JSON schema, or its text
MAX_PROMPTS = 1024
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
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
log = structlog.get_logger()
MAX_NAMES = 20
MAX_NAME_CHARS = 60
MOST_NAMES = 200  # that are sorted
_Steps = tuple[str | int, ...]
_Part = tuple[_Steps, dict[str, Any]]  # where an object is, and its unknown fields
_PLAIN = {type(None), bool, int, float, str, dict}  # to ask any other way takes far longer
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header


def _pause(value: Any) -> Any:
    """Let other threads have the interpreter, which the validator itself never does."""
    return value


def _bounded(schema: Any, forbids: bool) -> Any:
    """Bound the errors of a schema and of those within it."""
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(inner, forbids) for inner in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    # Another object, which has done this itself.
    if kind == "model":
        return schema
    for key, inner in schema.items():
        # It is a field of that name.
        if key != "metadata" or not isinstance(kind, str):
            schema[key] = _bounded(inner, forbids)
    if kind == "list":
        schema["fail_fast"] = True
        items = schema.get("items_schema", {})
        if items.get("type") not in _QUICK:
            schema["items_schema"] = before(_pause, items)
    elif kind == "dict" and "max_length" in schema:
        return _trimmed(schema, _at_most(schema["max_length"] + 1))
    elif kind == "model-fields" and forbids:
        return _trimmed(schema, _one_unknown(frozenset(schema["fields"])))
    return schema


def _trimmed(schema: Any, part_of: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Have a schema see a part of an object."""

    def trim(value: Any) -> Any:
        return part_of(value) if isinstance(value, dict) else value

    return before(trim, schema)


def _at_most(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def trimmed(value: dict[str, Any]) -> dict[str, Any]:
        return value if len(value) <= count else dict(islice(value.items(), count))

    return trimmed


def _one_unknown(known: frozenset[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def trimmed(value: dict[str, Any]) -> dict[str, Any]:
        first = next((name for name in value if name not in known), None)
        if first is None:
            return value
        return {name: item for name, item in value.items() if name in known or name == first}

    return trimmed


class Bounded(BaseModel):
    """An object with few errors, whatever fields it has and however long their values are."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Bound the errors of all fields, those of later versions too."""
        schema: Any = handler(source)
        # It is being made.
        if not isinstance(cls.__dict__.get("__pydantic_core_schema__"), dict):
            own = schema
            # But a validator around it.
            while own["type"] != "model":
                own = own["schema"]
            forbids = cls.model_config.get("extra") == "forbid"
            own["schema"] = _bounded(own["schema"], forbids)
        return cast("CoreSchema", schema)


class BodyPart(Bounded):
    """Base of the objects in a body. A number is no text, and neither a truth value nor a fraction is an integer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class JsonSchema(BodyPart):
    """``response_format.json_schema``."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="refuse keywords that no grammar can enforce")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BodyPart):
    """``response_format``: what the whole answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BodyPart):
    """``structured_outputs``: the same, as vLLM has it. At most one of the fields is given."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: AllowedTexts | None = None


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

    @classmethod
    def elsewhere(cls) -> Mapping[str, str]:
        """Fields of other routes that this one refuses, each with the one to use instead, if there is one."""
        return {}


class Extension(BodyPart):
    """The ``moesaic`` object of a request; other fields are refused."""

    quality: Literal["standard", "exact"] = Field(
        "standard",
        description="exact: experts are never replaced by others, also under overload; such a request "
        "may wait, or fail with 503",
    )
    min_threshold: float = Field(
        0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="smallest share of expert choices that stay exact while others are degraded; 1 "
        "equals quality exact",
    )
    deadline_ms: int | None = Field(None, ge=1, le=86_400_000)
    priority: Priority = 0
    provenance: bool = False
    site: str = Field(
        "",
        max_length=64,
        description="edge agents: site whose agent answers while it accepts requests; default: the "
        "header X-Moesaic-Site, then the setting of the gateway",
    )
    store_kv: bool | None = Field(
        None,
        description="false: score without storing or reusing the KV of the prompt; default: the setting "
        "of the workers. Generations always store KV",
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


def check_extras(body: BaseModel) -> list[str]:
    """Refuse fields that cannot be honoured, and name those that are passed over.

    Returns:
        Names of unknown fields that have a value, sorted, safe in a header; of very many some, and ``and-more``.

    Raises:
        InvalidInput: with code ``unsupported_parameter`` and the field's name.
    """
    ignored: set[str] = set()
    for name, value in (body.model_extra or {}).items():
        refusal = REFUSED.get(name)
        if name == "best_of" and refusal is not None:
            refusal = refusal._replace(neutral=(getattr(body, "n", 1),))
        _take(name, value, refusal, ignored, name)
    parts: list[_Part] = []
    _find_parts(body, (), parts)
    for steps, extras in parts:
        name = ".".join(step for step in steps if isinstance(step, str))
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        for field, value in extras.items():
            refusal = WITHIN.get(name, {}).get(field)
            if name in ONLY_KNOWN:
                refusal = Refusal("", ONLY_KNOWN[name])
            _take(f"{place[1:]}.{field}", value, refusal, ignored, f"{name}.{field}")
    return _shown(ignored)


def with_template(
    ignored: Sequence[str], keywords: Sequence[str], words: Collection[str]
) -> list[str]:
    """List the ignored fields of a chat, when its template is known.

    Args:
        ignored: fields that ``check_extras`` named.
        keywords: keywords for the template that it does not ask for.
        words: fields that the template names, so fields of messages with these names are not ignored. No field of
            tools is ignored, since tools reach the template whole.
    """
    left = {
        name
        for name in ignored
        if not name.startswith("tools.")
        and (name.removeprefix("messages.") not in words or "." not in name)
    }
    return _shown(left | set(keywords[:MOST_NAMES]))


def _take(field: str, value: Any, refusal: Refusal | None, ignored: set[str], name: str) -> None:
    if value is None:
        return
    if refusal is None:
        if len(ignored) < MOST_NAMES:
            ignored.add(name)
    elif value not in refusal.neutral:
        alternatives = [f"use {refusal.instead}"] if refusal.instead else []
        neutral = "".join(f" or send {json.dumps(value)}" for value in refusal.neutral)
        alternatives.append(f"leave it out{neutral}")
        fix = f"is not supported: {', or '.join(alternatives)}"
        raise InvalidInput(field[: 3 * MAX_NAME_CHARS], fix, code="unsupported_parameter")


def _find_parts(body: BaseModel, steps: _Steps, found: list[_Part]) -> None:
    """Find the objects within a body that have unknown fields: few of what may be thousands."""
    for field, value in body.__dict__.items():
        if type(value) in _PLAIN:
            continue
        if type(value) is not list:
            _note_part(value, (*steps, field), found)
        elif value and type(value[0]) is not int:
            for i, item in enumerate(value):
                if type(item) not in _PLAIN:
                    _note_part(item, (*steps, field, i), found)


def _note_part(item: Any, steps: _Steps, found: list[_Part]) -> None:
    extras = getattr(item, "__pydantic_extra__", None)
    if extras:
        found.append((steps, extras))
    # It is an object, not a list.
    if extras is not None:
        _find_parts(item, steps, found)


def _shown(names: set[str]) -> list[str]:
    if not names:
        return []
    log.debug("request.fields_ignored", fields=sorted(names)[:MAX_NAMES])
    return few(sorted({_UNSAFE.sub("_", name[:MAX_NAME_CHARS]) for name in names}))


def few(names: list[str]) -> list[str]:
    """Limit the names in a header: the first ones, and ``and-more`` for the others."""
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], "and-more"]
