"""Messages: the body of ``/v1/chat/completions``."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.models.text.message_forms import REASONING_FIELDS
from moesaic.services.gateway.fields.bodies import TextPart, checked_texts
from moesaic.services.gateway.fields.formats import BodyPart

_ROLES = ("system", "developer", "user", "assistant", "tool")


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

    role: str = Field(
        max_length=64,
        description=f"{', '.join(_ROLES)}, or another role that the chat template names",
    )
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCallWire], Field(max_length=1024)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning: str | None = Field(None, description="of an assistant's turn; for templates")
    reasoning_content: str | None = Field(None, description="the same")
    thinking: str | None = Field(None, description="the same")

    def for_template(self, field: str, words: Collection[str] = ()) -> dict[str, Any]:
        """Write the turn as chat templates take it.

        Args:
            field: its place in the request, for errors.
            words: fields and strings that the template names, such as custom roles. If it does not name the role
                developer, such messages become system messages.

        Raises:
            InvalidInput: the turn has content other than text, a field that its role does not have, or an unknown role.
        """
        if self.role == "function":
            fix = "functions are not supported: use tools, and a message with role tool"
            raise InvalidInput(f"{field}.role", fix, code="unsupported_parameter")
        if self.role not in _ROLES and self.role not in words:
            fix = f"must be one of {', '.join(_ROLES)}, or a role that the chat template names"
            raise InvalidInput(f"{field}.role", fix)
        if self.tool_calls and self.role != "assistant":
            raise InvalidInput(f"{field}.tool_calls", "belong to messages with role assistant")
        instructs = self.role == "developer" and "developer" not in words
        turn: dict[str, Any] = {"role": "system" if instructs else self.role}
        if self.content is not None:
            texts = checked_texts(self.content, f"{field}.content")
            if not isinstance(texts, str):
                turn["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                turn["content"] = texts
        if self.role == "assistant":
            turn |= self._calls_and_reasoning()
        if self.role == "tool" and self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn | (self.model_extra or {})

    def _calls_and_reasoning(self) -> dict[str, Any]:
        turn: dict[str, Any] = {}
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        for name in REASONING_FIELDS:
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        return turn


def turns_of(messages: Sequence[Message], words: Collection[str] = ()) -> list[dict[str, Any]]:
    """Write a conversation as chat templates take it.

    Args:
        messages: the turns.
        words: fields and strings that the template names.

    Raises:
        InvalidInput: a turn has content other than text, a field that its role does not have, or an unknown role.
    """
    return [message.for_template(f"messages[{i}]", words) for i, message in enumerate(messages)]
