"""Bodies of the routes that generate text, with the fields that say how tokens are picked.

A field of ``SamplingWire`` that carries ``OnWire`` goes to workers under its own name. A test holds the other places
against it: ``Sampling`` of attention.proto, ``Sampling`` of the engine, and the worker's reading of the one into the
other.

What a body leaves out is as the model's maker has it (``defaults``), and else as here.

| Field of a body | Left out | On the wire |
|---|---|---|
| ``temperature``, ``repetition_penalty`` | 1 | the number |
| ``top_p`` | 1 | the number; for 0 the smallest share, so that only the most likely token is left |
| ``top_k`` | 0, as -1: all tokens | the number |
| ``min_p``, ``presence_penalty``, ``frequency_penalty`` | 0 | the number |
| ``logit_bias``, ``allowed_token_ids`` | empty | the same |
| ``seed`` | drawn at random for each answer | one number per answer |
| ``bad_words`` | none | tokens of each word |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from moesaic.services.gateway.fields.bodies import (
    MAX_PROMPTS,
    NULL_IS_DEFAULT,
    TOKEN_IDS,
    AllowedTexts,
    BodyPart,
    InferenceWire,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    TokenId,
    TokenKey,
    as_list,
    is_text_or_ids,
)
from moesaic.services.gateway.fields.messages import Message, ToolFields
from moesaic.services.gateway.fields.truncating import MEANING, KeptTokens
from moesaic.v1.attention_pb2 import Sampling, Word

MAX_LOGIT_BIASES = 1024
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 128
INT64 = 1 << 63
# Workers count shares in steps of this, and read 0 as 1.
LEAST_TOP_P = 2.0**-53
MAX_CHOICES = 64
MAX_ANSWERS = 1 << 12  # of one request: choices of all its prompts
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 20
Stops = TypeVar("Stops", bound=str | list[str] | None)
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True)
class OnWire:
    """A field that workers get by its own name.

    Attributes:
        neutral: value for the wire where the body has none, or one that means nothing.
        encode: from the body's value to the wire's.
    """

    neutral: Any
    encode: Callable[[Any], Any] = lambda value: value


def _without_sign(value: float) -> float:
    """Give zero for minus zero, which JSON can write: fields of 0 are left out on the wire."""
    return value or 0.0


def _once_each(token_ids: Sequence[int]) -> list[int]:
    """Leave out repetitions, so that there are no more than the vocabulary has."""
    return sorted(set(token_ids))


class LengthWire(InferenceWire):
    """Bounds of an answer's length."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=1 << 31, description="another name of max_tokens, which it overrides"
    )
    min_tokens: int = Field(0, ge=0, lt=1 << 31)

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of an answer, if the caller bounds them."""
        asked: int | None = getattr(self, self.answer_tokens_field)
        return asked

    @property
    def answer_tokens_field(self) -> str:
        """Name of the field that bounds them."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class SamplingWire(LengthWire):
    """Choice of an answer's tokens."""

    temperature: Annotated[float | None, OnWire(1.0)] = Field(None, ge=0, le=2)
    top_p: Annotated[float | None, OnWire(1.0, lambda p: max(p, LEAST_TOP_P))] = Field(
        None, ge=0, le=1, description="0: only the most likely token"
    )
    top_k: Annotated[int | None, OnWire(0, lambda k: max(0, k))] = Field(None, ge=-1, lt=1 << 31)
    min_p: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(None, ge=0, le=1)
    repetition_penalty: Annotated[float | None, OnWire(1.0)] = Field(None, gt=0, le=10)
    presence_penalty: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(None, ge=-2, le=2)
    frequency_penalty: Annotated[float | None, OnWire(0.0, _without_sign)] = Field(
        None, ge=-2, le=2
    )
    logit_bias: Annotated[
        dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None, OnWire({})
    ] = Field(None, max_length=MAX_LOGIT_BIASES)
    allowed_token_ids: Annotated[list[TokenId] | None, OnWire((), _once_each)] = Field(
        None, max_length=MAX_ALLOWED
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, max_length=MAX_BAD_WORDS
    )
    seed: int | None = Field(
        None,
        ge=-INT64,
        lt=INT64,
        description="of the first answer; each further one adds 1; default: random",
    )

    def sampling(
        self, seed: int, bad_words: Sequence[Word], defaults: "SamplingWire | None" = None
    ) -> Sampling:
        """Encode the fields for workers.

        Args:
            seed: of one answer; any integer, it wraps to 64 bits.
            bad_words: the tokens of ``bad_words``.
            defaults: for fields that are left out.
        """
        values = {}
        for name, on_wire in SAMPLED.items():
            value = getattr(self, name)
            if value is None and defaults is not None:
                value = getattr(defaults, name)
            values[name] = on_wire.neutral if value is None else on_wire.encode(value)
        return Sampling(**values, seed=wrapped(seed), bad_words=bad_words)


def wrapped(seed: int) -> int:
    """Wrap any integer to the 64 bits of a seed."""
    return (seed + INT64) % (2 * INT64) - INT64


SAMPLED: dict[str, OnWire] = {
    name: mark
    for name, field in SamplingWire.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, OnWire)
}
"""The fields that go to workers under their own names."""


class StreamOptions(BodyPart):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def bounded_stops(stop: Stops) -> Stops:
    """Give stop strings back.

    Raises:
        ValueError: there are many, or long ones.
    """
    strings = as_list(stop)
    if len(strings) > MAX_STOPS or not all(0 < len(string) <= 1024 for string in strings):
        raise ValueError(f"must be at most {MAX_STOPS} strings of 1 to 1024 characters")
    # Each token is compared with all of them.
    if sum(map(len, strings)) > MAX_STOP_CHARS:
        raise ValueError(f"must be at most {MAX_STOP_CHARS} characters together")
    return stop


class GenerationWire(SamplingWire):
    """Fields that chat and plain completions have in common."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[str | list[str] | None, AfterValidator(bounded_stops)] = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate_prompt_tokens: KeptTokens | None = Field(None, description=MEANING)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: AllowedTexts | None = None
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

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "GenerationWire":
        options = self.stream_options
        asks = options is not None and (options.include_usage or options.continuous_usage_stats)
        if asks and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream to be false")
        return self

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return self.n

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return as_list(self.stop)


class ChatWire(GenerationWire, ToolFields):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool | None = Field(
        None, description="true: continue the text of the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="effort, if the chat template supports it; none: no reasoning"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="passed to chat templates that read it"
    )
    include_reasoning: bool | None = Field(None, description="false: leave it out of the answer")


class CompletionWire(GenerationWire):
    """Body of ``/v1/completions``; ``prompt`` is a text, a list of texts, token ids, or a list of those."""

    prompt: Any = Field(
        ...,
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                TOKEN_IDS,
                {"type": "array", "items": TOKEN_IDS, "minItems": 1},
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
        prompts = [value] if is_text_or_ids(value) else value
        if not isinstance(prompts, list) or not all(is_text_or_ids(prompt) for prompt in prompts):
            raise ValueError("must be a string, a list of strings, token ids, or a list of those")
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ValueError(f"must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
        return prompts

    @model_validator(mode="after")
    def _something_is_wanted(self) -> "CompletionWire":
        if self.answer_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens may be 0 only with echo or prompt_logprobs")
        return self

    @property
    def num_runs(self) -> int:
        """See ``InferenceWire``."""
        return len(self.prompt) * self.n
