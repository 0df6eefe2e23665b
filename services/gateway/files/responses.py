"""One tenant's stored responses."""

import re
from pathlib import Path
from typing import Any

import msgspec

from moesaic.errors import MoesaicError
from moesaic.services.gateway.files.disk import (
    NoSuch,
    entries,
    made_at,
    new_directory,
    read_document,
    remove_directory,
    remove_unfinished,
    used_bytes,
    write_whole,
)

MAX_RESPONSES = 10_000  # of a tenant; the oldest make room for new ones
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{28}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{28})[0-9a-f]{4,}")


class ConversationTooLarge(MoesaicError):
    """A stored conversation is, or would be, larger than the bodies that a gateway reads."""

    code = "conversation_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, num_bytes: int, most: int) -> None:
        what = f"the stored conversation has {num_bytes} bytes, and --max-body-bytes {most} is the most"
        super().__init__(f"{what}; begin a new one with the items that are still needed")

    @classmethod
    def check(cls, num_bytes: int, most: int) -> None:
        """Refuse a conversation that has more bytes than that."""
        if num_bytes > most:
            raise cls(num_bytes, most)


class StoredResponse(msgspec.Struct, frozen=True):
    """A response on the disk, with all items that it answered, also those of the responses before it."""

    response: msgspec.Raw
    input: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation up to its end."""
        output: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return [*self.input, *output]


class ResponseShelf:
    """One tenant's stored responses. All methods do file work and raise OSError.

    Args:
        root: their directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, response_id: str, document: bytes) -> None:
        """Keep a new response, a ``StoredResponse`` as JSON."""
        with new_directory(self._root / response_id) as directory:
            write_whole(directory / "response.json", document)

    def read(self, response_id: str, most: int | None = None) -> StoredResponse:
        """Read a response.

        Args:
            response_id: its id.
            most: bytes that it may have; None: any number.

        Raises:
            NoSuch: it is not there.
            ConversationTooLarge: it has more bytes.
        """
        path = self._directory(response_id) / "response.json"
        if most is not None and path.exists():
            ConversationTooLarge.check(path.stat().st_size, most)
        stored = read_document(path, StoredResponse)
        if stored is None:
            raise NoSuch("response", response_id)
        return stored

    def item(self, item_id: str, most: int) -> dict[str, Any]:
        """Read an item of a response, by its own id.

        Raises:
            NoSuch: it is not there.
            ConversationTooLarge: its response has more bytes than ``most``.
        """
        if (found := _ITEM_ID.fullmatch(item_id)) is not None:
            try:
                items = self.read(f"resp_{found[1]}", most).items
            except NoSuch:
                items = []
            for item in items:
                if item["id"] == item_id:
                    return item
        raise NoSuch("item", item_id)

    def delete(self, response_id: str) -> None:
        """Forget a response. Later ones have a copy of its items.

        Raises:
            NoSuch: it is not there.
        """
        self.read(response_id)
        remove_directory(self._directory(response_id))

    def ids(self) -> list[str]:
        """List all ids, the latest first."""
        return [name for name in entries(self._root) if _RESPONSE_ID.fullmatch(name)]

    def trim(self, most: int) -> None:
        """Remove the oldest responses, so that at most so many are left."""
        for response_id in self.ids()[most:]:
            remove_directory(self._directory(response_id))

    def make_room(self, num_bytes: int) -> int:
        """Remove the oldest responses until so many bytes are free, and count them; none if all have not so many.

        A sixteenth of all goes too where it can: else each further response would need a look at all of them.
        """
        sizes = {name: used_bytes(self._directory(name)) for name in reversed(self.ids())}
        total, freed = sum(sizes.values()), 0
        if total < num_bytes:
            return 0
        for response_id, size in sizes.items():
            if freed >= num_bytes and freed + size > num_bytes + total // 16:
                break
            remove_directory(self._directory(response_id))
            freed += size
        return freed

    def sweep(self, unfinished_before: float, made_before: float) -> None:
        """Remove what was never finished, and responses that are old enough."""
        remove_unfinished(self._root, unfinished_before)
        for response_id in self.ids():
            if made_at(response_id) < made_before:
                remove_directory(self._directory(response_id))

    def _directory(self, response_id: str) -> Path:
        if not _RESPONSE_ID.fullmatch(response_id):
            raise NoSuch("response", response_id)
        return self._root / response_id
