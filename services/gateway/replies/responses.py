"""Answers of ``/v1/responses``: the response, its items, and the events that tell how it grows."""

from typing import Any, Literal

import msgspec

from moesaic.services.gateway.replies.accounts import Provenance, ResponseUsage
from moesaic.services.gateway.replies.generating import ChosenToken

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChosenToken] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    """The text of reasoning."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """Words of the model."""

    id: str
    status: Status = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """Reasoning of the model, as it is: nobody sums it up."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call that the model makes."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseFailure(msgspec.Struct):
    """The cause of a response's failure."""

    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """A response. Fields of the request are repeated as they were taken."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: str = "disabled"
    background: bool = False
    metadata: dict[str, str]
    user: str | None
    moesaic: Provenance | msgspec.UnsetType = msgspec.UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a streamed response; its type says which of the fields it has."""

    type: str
    sequence_number: int
    response: Response | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: OutputItem | msgspec.UnsetType = msgspec.UNSET
    part: OutputText | ReasoningText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChosenToken] | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
