"""Messages: the body of ``/v1/chat/completions``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import TextPart
from moesaic.services.gateway.fields.formats import BodyPart


class CalledFunction(BodyPart):
    """The function of a call, and its arguments as the model wrote them."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str = "{}"


class ToolCallWire(BodyPart):
    """A call that the assistant made."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BodyPart):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCallWire], Field(max_length=1024)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning: str | None = Field(None, description="of an assistant's turn; for templates")
    reasoning_content: str | None = Field(None, description="the same")

    def for_template(self, field: str) -> dict[str, Any]:
        """Write the turn as chat templates take it.

        Raises:
            InvalidInput: the turn holds something other than text, or what its role does not have.
        """
        if self.role == "function":
            fix = "functions are not supported: use tools, and a message with role tool"
            raise InvalidInput(f"{field}.role", fix, code="unsupported_parameter")
        if self.tool_calls and self.role != "assistant":
            raise InvalidInput(f"{field}.tool_calls", "belong to messages with role assistant")
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(field),
        }
        if self.role == "tool" and self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.role == "assistant":
            turn |= self._calls_and_reasoning()
        return turn

    def _text(self, field: str) -> str:
        parts = (
            [TextPart(type="text", text=self.content)]
            if isinstance(self.content, str)
            else self.content
        )
        for part in parts or []:
            if part.type not in ("text", "input_text") or part.text is None:
                what = f"content of type {part.type[:40]!r} is not supported, only text"
                raise InvalidInput(f"{field}.content", what, code="unsupported_parameter")
        return "\n".join(part.text or "" for part in parts or [])

    def _calls_and_reasoning(self) -> dict[str, Any]:
        turn: dict[str, Any] = {}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            turn["reasoning_content"] = reasoning
            if not (self.tool_calls and self.content):  # gpt-oss' template takes one of the two
                turn["thinking"] = reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return turn


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Write a conversation as chat templates take it.

    Raises:
        InvalidInput: a turn holds something other than text, or what its role does not have.
    """
    return [message.for_template(f"messages[{i}]") for i, message in enumerate(messages)]
