"""What callers may send: the fields of each route, with their bounds.

Whatever else would change the answer is refused by name, and the rest is passed over and named (``unsupported.py``).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from moesaic.classification.forms import MAX_LABELS
from moesaic.errors import InvalidInput
from services.gateway.formats import Choices, Part, ResponseFormat, Schema, StructuredOutputs

MAX_PROMPTS = 1024
MAX_CHOICES = 64
MAX_ANSWERS = 1 << 14  # of one request: choices of all its prompts
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 128
INT64 = 1 << 63
NULL_IS_DEFAULT = {
    *("moesaic", "min_tokens", "n", "stop_token_ids", "ignore_eos", "stream"),
    *("skip_special_tokens", "include_stop_str_in_output"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}

_TOKEN_IDS: Any = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenKey = Annotated[int, BeforeValidator(lambda key: _number_of(key)), Field(ge=0, lt=1 << 32)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def _allow_null(schema: dict[str, Any]) -> None:
    """Describe that ``null`` is taken for the default."""
    properties = schema.get("properties", {})
    for name in NULL_IS_DEFAULT & properties.keys():
        told = properties[name]
        kept = {key: told.pop(key) for key in ("title", "description", "default") if key in told}
        properties[name] = {"anyOf": [told, {"type": "null"}], **kept}


class Wire(Part):
    """Base of every request body."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra=_allow_null)

    model: str | None = Field(None, description="name of the served model")


class Extension(Part):
    """The ``moesaic`` object of a request; other fields are refused."""

    quality: Literal["standard", "exact"] = "standard"
    deadline_ms: int | None = Field(None, ge=1, le=86_400_000)
    priority: Priority = 0
    provenance: bool = False
    store_kv: bool | None = Field(
        None,
        description="false: score without keeping the KV of the prompt, and without looking for any; "
        "default: as the workers are set up. Of no effect on generations, which need it",
    )


class InferenceWire(Wire):
    """What every inference route takes."""

    user: str | None = None
    request_id: str | None = None
    priority: Priority | None = Field(None, description="less goes first; default 0")
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


class StreamOptions(Part):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationWire(InferenceWire):
    """What chat and plain completions have in common."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="the same as max_tokens, over which it goes"
    )
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIASES
    )
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_ALLOWED
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    regex: str | None = Field(None, description="SGLang's structured_outputs.regex")
    ebnf: str | None = Field(None, description="SGLang's structured_outputs.grammar")
    grammar: str | None = Field(None, description="llama.cpp's structured_outputs.grammar")
    json_schema: Schema | None = Field(None, description="SGLang's structured_outputs.json")
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator(*sorted(NULL_IS_DEFAULT - {"moesaic"}), mode="wrap")
    @classmethod
    def _none_is_default(cls, value: Any, handler: Callable[[Any], Any], info: Any) -> Any:
        if value is None:
            return cls.model_fields[info.field_name].get_default(call_default_factory=True)
        return handler(value)

    @field_validator("stop")
    @classmethod
    def _stop_is_bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = as_list(stop)
        if len(strings) > MAX_STOPS or not all(0 < len(string) <= 1024 for string in strings):
            raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to 1024 characters")
        if sum(map(len, strings)) > MAX_STOP_CHARS:  # each token is compared with all of them
            raise ValueError(f"must be at most {MAX_STOP_CHARS} characters together")
        return stop

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "GenerationWire":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream to be false")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that an answer may have, if the caller says so."""
        asked: int | None = getattr(self, self.answer_tokens_field)
        return asked

    @property
    def answer_tokens_field(self) -> str:
        """The field that says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return as_list(self.stop)


class TextPart(Part):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(Part):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self, field: str) -> dict[str, str]:
        """The turn as chat templates take it.

        Raises:
            InvalidInput: it holds something other than text.
        """
        if self.role in ("tool", "function"):
            raise InvalidInput(field, "tools are not supported yet", code="unsupported_parameter")
        parts = (
            [TextPart(type="text", text=self.content)]
            if isinstance(self.content, str)
            else self.content
        )
        for part in parts or []:
            if part.type not in ("text", "input_text") or part.text is None:
                what = f"content of type {part.type[:40]!r} is not supported, only text"
                raise InvalidInput(f"{field}.content", what, code="unsupported_parameter")
        text = "\n".join(part.text or "" for part in parts or [])
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatWire(GenerationWire):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionWire(GenerationWire):
    """Body of ``/v1/completions``; ``prompt`` is a text, a list of texts, token ids, or a list of those."""

    prompt: Any = Field(
        ...,
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        },
    )
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)  # 0: of interest is the prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        # Checked by hand: a union of four types reports every item four times over.
        prompts = [value] if _is_prompt(value) else value
        if not isinstance(prompts, list) or not all(_is_prompt(prompt) for prompt in prompts):
            raise ValueError("must be a string, a list of strings, token ids, or a list of those")
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
        return prompts

    @model_validator(mode="after")
    def _something_is_wanted(self) -> "CompletionWire":
        if self.answer_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens may be 0 only with echo or prompt_logprobs")
        return self


class LabelWire(Part):
    """A label with its description."""

    label: str
    description: str | None = None


class ClassifyWire(InferenceWire):
    """Body of ``/v1/classify``."""

    input: str | Annotated[list[str], Field(fail_fast=True)]
    labels: (
        Annotated[
            list[str | LabelWire],
            Field(fail_fast=True, json_schema_extra={"minItems": 2, "maxItems": MAX_LABELS}),
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


class TokenizeWire(Wire):
    """Body of ``/tokenize``: a prompt or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeWire(Wire):
    """Body of ``/detokenize``."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def as_list(value: str | list[str] | None) -> list[str]:
    """One, many or none as a list."""
    return [value] if isinstance(value, str) else value or []


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _number_of(key: Any) -> Any:
    """The number that a member's name spells, if it is one: JSON has only texts there."""
    plain = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if plain else key
