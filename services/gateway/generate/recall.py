"""The items that a response goes on from: its own, and those of responses that are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.response_items import (
    ItemWire,
    Messages,
    NewId,
    items_of,
    listed,
)
from moesaic.services.gateway.fields.responses import ResponsesWire
from moesaic.services.gateway.files.disk import NoSuch, on_disk
from moesaic.services.gateway.files.responses import ConversationTooLarge
from moesaic.services.gateway.files.shelf import Shelf
from moesaic.services.gateway.http.problems import RouteNotEnabled

Item = dict[str, Any]  # as it is listed


class NothingStored(RouteNotEnabled):
    """A body names a stored response, but this gateway stores none."""

    field = "previous_response_id"

    def __init__(self) -> None:
        what = "previous_response_id: this gateway stores no responses"
        super().__init__(f"{what}; start it with --files-dir, or send the whole conversation")


@dataclass
class Recalled:
    """Stored items that a body names.

    Attributes:
        before: the conversation up to the new input.
        referred: items that the new input refers to, by their places in it.
        num_bytes: of all these.
    """

    before: Sequence[Item] = ()
    referred: dict[int, Item] = field(default_factory=dict)
    num_bytes: int = 0


async def recall(body: ResponsesWire, shelf: Shelf | None, most: int) -> Recalled:
    """Read the stored items that a body names.

    Args:
        body: the body.
        shelf: of its tenant; None: nothing is stored.
        most: bytes that the items may have together, and each response that they are from.

    Raises:
        NothingStored: it names a response, but none are stored.
        InvalidInput: the response, or an item, is not there, or there are too many bytes.
    """
    items = () if isinstance(body.input, str) else body.input
    references = {i: item for i, item in enumerate(items) if item.kind == "item_reference"}
    if body.previous_response_id is not None and shelf is None:
        raise NothingStored
    if shelf is None:
        for i in references:
            fix = "this gateway stores no items: send the item itself"
            raise InvalidInput(f"input[{i}].id", f"{fix}, or start the gateway with --files-dir")
        return Recalled()
    if body.previous_response_id is None and not references:
        return Recalled()
    kept = shelf.responses

    def read() -> Recalled:
        found = Recalled()
        place = "previous_response_id"
        try:
            if body.previous_response_id is not None:
                found.before = kept.read(body.previous_response_id, most).items
                found.num_bytes = len(msgspec.json.encode(found.before))
            for i, item in references.items():
                place = f"input[{i}].id"
                found.referred[i] = kept.item(item.id or "", most)
                found.num_bytes += len(msgspec.json.encode(found.referred[i]))
                ConversationTooLarge.check(found.num_bytes, most)
        except ConversationTooLarge as error:
            raise InvalidInput(place, str(error), code=error.code) from None
        except NoSuch as error:
            lacks_all = place == "previous_response_id"
            code = "previous_response_not_found" if lacks_all else "invalid_request"
            raise InvalidInput(place, str(error), code=code) from None
        return found

    return await on_disk(read)


def conversation_of(
    body: ResponsesWire, recalled: Recalled, new_id: NewId
) -> tuple[Messages, list[Item]]:
    """Put the items together.

    Returns:
        The chat's messages, and all items as they are listed.

    Raises:
        InvalidInput: an item is of an unknown type, or lacks a field.
    """
    messages, everything = Messages(body.instructions), list[Item]()

    def take(wire: ItemWire, place: str) -> None:
        messages.take(wire, place)
        everything.append(listed(wire, new_id))

    for item in recalled.before:
        take(ItemWire.model_validate(item), "previous_response_id")
    for i, wire in enumerate(items_of(body.input)):
        place = "input" if isinstance(body.input, str) else f"input[{i}]"
        referred = recalled.referred.get(i)
        take(wire if referred is None else ItemWire.model_validate(referred), place)
    return messages, everything
