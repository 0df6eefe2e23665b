"""Bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's API has them.

Fields that say where to keep a prefix, or when to send arguments, are taken and change nothing: prefixes are always
shared, and arguments are always sent as they come.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moesaic.services.gateway.fields.bodies import BodyPart, Bounded, InferenceWire, RequestBody
from moesaic.services.gateway.fields.generating import ChatWire, bounded_stops
from moesaic.services.gateway.fields.messages import MAX_TOOLS, FunctionName, ObjectSchema

MAX_MESSAGES = 4096
LEAST_BUDGET = 1024
_UNUSED = Field(None, description="changes nothing")


class AnthropicText(BodyPart):
    """A block of text: of ``system``, or of a tool's result."""

    type: str = Field(description="text; others are refused")
    text: str | None = None
    cache_control: Any | None = _UNUSED
    citations: Any | None = _UNUSED


class AnthropicBlock(AnthropicText):
    """A block of a message; its type says which fields it needs."""

    type: str = Field(
        description="text, tool_use, tool_result, thinking, redacted_thinking; others are refused"
    )
    id: str | None = Field(None, min_length=1, max_length=256, description="of tool_use")
    name: str | None = Field(None, min_length=1, max_length=256, description="of tool_use")
    input: dict[str, Any] | None = Field(None, description="of tool_use")
    tool_use_id: str | None = Field(None, max_length=256, description="of tool_result")
    content: str | list[AnthropicText] | None = Field(None, description="of tool_result")
    is_error: bool | None = Field(
        None, description="of tool_result; ignored, since no chat template tells it"
    )
    thinking: str | None = Field(None, description="of thinking")
    signature: Any | None = Field(None, description="of thinking; not checked")
    data: Any | None = Field(None, description="of redacted_thinking, which is left out")
    caller: Any | None = _UNUSED


class AnthropicMessage(BodyPart):
    """One turn; turns of one role that follow each other are one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnthropicBlock]


class AnthropicTool(BodyPart):
    """A tool that the client runs."""

    type: str | None = Field(None, description="custom, as without the field; others are refused")
    name: FunctionName
    description: str | None = None
    input_schema: ObjectSchema
    strict: bool | None = Field(None, description="calls always fit the schema")
    cache_control: Any | None = _UNUSED
    eager_input_streaming: Any | None = _UNUSED
    defer_loading: Any | None = _UNUSED
    allowed_callers: Any | None = _UNUSED

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            what = f"tools of type {str(kind)[:60]!r} are not supported"
            raise ValueError(f"{what}: define the tool with name and input_schema, or leave it out")
        return tool


def _names_differ(tools: list[AnthropicTool]) -> list[AnthropicTool]:
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tools[{i}].name: {name!r} appears twice")
    return tools


class AnthropicToolChoice(BodyPart):
    """The calls that an answer may have."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of the tool; with type tool")
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and only there")
        return self


class AnthropicThinking(BodyPart):
    """Reasoning before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=LEAST_BUDGET, description="ignored")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks are empty"
    )

    @model_validator(mode="after")
    def _enabled_has_a_budget(self) -> "AnthropicThinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens is required with type enabled, and only there")
        return self


class AnthropicFormat(BodyPart):
    """The form of the whole answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutput(BodyPart):
    """The form of the answer, and the effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicFormat | None = None


class AnthropicFields(Bounded):
    """A conversation with its tools."""

    model_config = ConfigDict(extra="allow", strict=True)

    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[AnthropicText] | None = None
    tools: (
        Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), AfterValidator(_names_differ)]
        | None
    ) = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutput | None = None
    cache_control: Any | None = _UNUSED


class CountTokensWire(RequestBody, AnthropicFields):
    """Body of ``/v1/messages/count_tokens``."""


class MessagesWire(InferenceWire, AnthropicFields):
    """Body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    stop_sequences: Annotated[list[str] | None, AfterValidator(bounded_stops)] = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, description="default: the model's own")
    top_p: float | None = Field(None, ge=0, le=1, description="default: the model's own")
    top_k: int | None = Field(None, ge=0, lt=1 << 31, description="default: the model's own")
    metadata: dict[str, Any] | None = _UNUSED
    service_tier: Literal["auto", "standard_only"] | None = _UNUSED

    @field_validator("max_tokens")
    @classmethod
    def _budget_leaves_an_answer(cls, max_tokens: int, others: ValidationInfo) -> int:
        # It is a field of a base, so it has been read, unless it is wrong itself.
        thinking = others.data.get("thinking")
        budget = thinking.budget_tokens if thinking is not None else None
        if budget is not None and budget >= max_tokens:
            raise ValueError(f"must be more than thinking.budget_tokens ({budget})")
        return max_tokens

    @classmethod
    def elsewhere(cls) -> Mapping[str, str]:
        """Fields that only a chat has, and that would change its answer."""
        names = ChatWire.model_fields.keys() - cls.model_fields.keys()
        return {name: "stop_sequences" if name == "stop" else "" for name in sorted(names)}

    @property
    def chat_fields(self) -> list[str]:
        """Names of the fields of a chat that this body has."""
        known = ChatWire.model_fields
        return [
            name
            for name, value in (self.model_extra or {}).items()
            if name in self.elsewhere()
            and value not in (None, known[name].get_default(call_default_factory=True))
        ]
