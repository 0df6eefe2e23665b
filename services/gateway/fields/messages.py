"""Messages: the body of ``/v1/chat/completions``."""

from typing import Annotated, Literal

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import TextPart
from moesaic.services.gateway.fields.formats import BodyPart


class Message(BodyPart):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self, field: str) -> dict[str, str]:
        """Write the turn as chat templates take it.

        Raises:
            InvalidInput: the turn holds something other than text.
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
