"""Wire messages that have the fields of our own structs under the same names."""

from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def filled(kind: type[M], *sources: object, **given: Any) -> M:
    """Make a wire message with all fields: those ``given``, the others from the first source that has them.

    A field that is None stays absent.

    Raises:
        AttributeError: no source has a field.
    """
    fields = {
        name: getattr(next((one for one in sources if hasattr(one, name)), sources[-1]), name)
        for name in kind.DESCRIPTOR.fields_by_name
        if name not in given
    }
    return kind(**fields, **given)


def changes_of(wire: Message) -> dict[str, Any]:
    """Read the fields that a message has: those that a caller wants to change."""
    return {field.name: value for field, value in wire.ListFields()}
