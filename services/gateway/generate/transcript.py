"""The growing output of a response: a chat's chunks become items, and events that tell of them."""

import time
from collections.abc import Callable
from copy import copy
from http import HTTPStatus
from typing import Any

from msgspec import UNSET

from moesaic.services.gateway.fields.response_tools import Origin
from moesaic.services.gateway.http.problems import HttpProblem
from moesaic.services.gateway.replies.accounts import Provenance, Usage, response_usage
from moesaic.services.gateway.replies.generating import (
    CalledFunctionReply,
    ChatChunkChoice,
    ChosenToken,
    ToolCallDelta,
)
from moesaic.services.gateway.replies.responses import (
    FunctionCallItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponseFailure,
    Status,
)

Events = list[ResponseEvent]


class Transcript:
    """The output of one response, item by item: at most the last one is open.

    Args:
        response: what is known before its answer; it is filled in.
        new_id: makes the id of an item of a type.
        origin: finds the function that the model calls by a name.

    Attributes:
        begun: clients have been told of the response.
    """

    def __init__(
        self, response: Response, new_id: Callable[[str], str], origin: Callable[[str], Origin]
    ) -> None:
        self.response, self.begun = response, False
        self._new_id, self._origin = new_id, origin
        self._output: list[Any] = []
        self._pieces: list[str] = []  # text or arguments of the open item
        self._logprobs: list[ChosenToken] = []  # of the open message
        self._untold: list[ChosenToken] = []  # of tokens whose text has not come yet
        self._other = False  # some of these are of reasoning or calls
        self._open = False
        self._cut = False
        self._count = 0

    def opening(self) -> Events:
        """Tell of the response, before all else."""
        self.begun = True
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=copy(self.response)) for kind in kinds]

    def take(self, chunk: ChatChunkChoice) -> Events:
        """Take what comes next."""
        delta, events = chunk.delta, Events()
        if chunk.logprobs is not None:
            # Tokens come with the first chunk that they make; the first ones of a message may follow in it.
            if self._other:
                self._untold.clear()
            self._untold += chunk.logprobs.content
            self._other = False
        self._other = self._other or bool(delta.reasoning or delta.tool_calls)
        if delta.reasoning:
            events += self._take_text(ReasoningItem, delta.reasoning)
        if delta.content:
            events += self._take_text(OutputMessage, delta.content)
        for call in delta.tool_calls or ():
            events += self._take_call(call, call.function or CalledFunctionReply())
        self._cut = self._cut or chunk.finish_reason == "length"
        return events

    def ended(self, usage: Usage, provenance: Provenance) -> Events:
        """Complete the response, whose answer is complete or was cut; the last event tells that."""
        status: Status = "incomplete" if self._cut else "completed"
        events = [] if self._output else self._opened(OutputMessage(id=self._new_id("message")))
        events += self._close(status)
        response = self.response
        response.status, response.output = status, self._output
        response.usage, response.moesaic = response_usage(usage), provenance
        if self._cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = int(time.time())
        return events

    def last_event(self) -> ResponseEvent:
        """Tell how the response has ended, once it is kept."""
        return self._event(f"response.{self.response.status}", response=self.response)

    def failed(self, problem: HttpProblem) -> Events:
        """End the response with an error, whatever it has by now."""
        events = [] if self.begun else self.opening()
        events += self._close("incomplete")
        response, body = self.response, problem.body
        response.status, response.output, response.completed_at = "failed", self._output, None
        # OpenAI's own codes; ours is in the text.
        limited = problem.status == HTTPStatus.TOO_MANY_REQUESTS
        code = (
            "invalid_prompt"
            if problem.status < HTTPStatus.INTERNAL_SERVER_ERROR
            else "server_error"
        )
        code = "rate_limit_exceeded" if limited else code
        response.error = ResponseFailure(code, f"{body.message} ({body.code})")
        return [*events, self.last_event()]

    def _take_text(self, kind: type[OutputMessage | ReasoningItem], text: str) -> Events:
        events = []
        if not (self._open and isinstance(self._output[-1], kind)):
            events += self._close("completed")
            name = "message" if kind is OutputMessage else "reasoning"
            events += self._opened(kind(id=self._new_id(name)))
        self._pieces.append(text)
        if kind is ReasoningItem:
            told = self._within("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            logprobs, self._untold = self._untold, []
            self._logprobs += logprobs
            told = self._within(
                "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
            )
        return [*events, told]

    def _take_call(self, call: ToolCallDelta, function: CalledFunctionReply) -> Events:
        events = []
        if call.id is not None:
            events += self._close("completed")
            name, namespace = self._origin(function.name or "")
            item = FunctionCallItem(id=self._new_id("function_call"), call_id=call.id, name=name)
            item.namespace = UNSET if namespace is None else namespace
            events += self._opened(item)
        if function.arguments:
            self._pieces.append(function.arguments)
            kind = "response.function_call_arguments.delta"
            events.append(self._within(kind, delta=function.arguments))
        return events

    def _opened(self, item: Any) -> Events:
        self._output.append(item)
        self._open = True
        events = [self._event("response.output_item.added", item=copy(item), **self._index)]
        if not isinstance(item, FunctionCallItem):
            part = OutputText() if isinstance(item, OutputMessage) else ReasoningText()
            kind = "response.content_part.added"
            events.append(self._within(kind, content_index=0, part=part))
        return events

    def _close(self, status: Status) -> Events:
        """End the open item, if one is open."""
        if not self._open:
            return []
        item, text = self._output[-1], "".join(self._pieces)
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            kind = "response.function_call_arguments.done"
            events = [self._within(kind, name=item.name, arguments=text)]
        elif isinstance(item, ReasoningItem):
            events = self._close_part(item, ReasoningText(text=text), "reasoning_text")
        else:
            last = [] if self._other else self._untold
            part = OutputText(text=text, logprobs=[*self._logprobs, *last])
            events = self._close_part(item, part, "output_text")
            events[0].logprobs = part.logprobs
        self._pieces, self._logprobs, self._open = [], [], False
        return [*events, self._event("response.output_item.done", item=item, **self._index)]

    def _close_part(self, item: Any, part: OutputText | ReasoningText, name: str) -> Events:
        item.content = [part]
        return [
            self._within(f"response.{name}.done", content_index=0, text=part.text),
            self._within("response.content_part.done", content_index=0, part=part),
        ]

    @property
    def _index(self) -> dict[str, int]:
        return {"output_index": len(self._output) - 1}

    def _within(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._event(kind, item_id=self._output[-1].id, **self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._count += 1
        return ResponseEvent(type=kind, sequence_number=self._count - 1, **fields)
