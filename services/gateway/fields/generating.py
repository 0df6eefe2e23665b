"""Bodies of the routes that generate text."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moesaic.services.gateway.fields.bodies import (
    MAX_PROMPTS,
    NULL_IS_DEFAULT,
    TOKEN_IDS,
    TokenId,
    as_list,
    is_text_or_ids,
)
from moesaic.services.gateway.fields.formats import (
    AllowedTexts,
    BodyPart,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from moesaic.services.gateway.fields.messages import Message
from moesaic.services.gateway.fields.sampling import SamplingWire
from moesaic.services.gateway.fields.tools import ToolFields

MAX_CHOICES = 64
MAX_ANSWERS = 1 << 12  # of one request: choices of all its prompts
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 20
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(BodyPart):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationWire(SamplingWire):
    """Fields that chat and plain completions have in common."""

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
        None, description="true: the model continues the text of the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="as far as the chat template knows it; none: no reasoning"
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
