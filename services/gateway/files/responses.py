"""One tenant's stored responses."""

import re
from pathlib import Path
from typing import Any

import msgspec

from moesaic.services.gateway.files.disk import (
    NoSuch,
    entries,
    made_at,
    new_directory,
    read_document,
    remove_directory,
    remove_unfinished,
    used_bytes,
    write_document,
)

MAX_RESPONSES = 10_000  # of a tenant; the oldest make room for new ones
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{28}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{28})[0-9a-f]{4,}")


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

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a new response."""
        with new_directory(self._root / response_id) as directory:
            write_document(directory / "response.json", stored)

    def read(self, response_id: str) -> StoredResponse:
        """Read a response.

        Raises:
            NoSuch: it is not there.
        """
        directory = self._directory(response_id)
        stored = read_document(directory / "response.json", StoredResponse)
        if stored is None:
            raise NoSuch("response", response_id)
        return stored

    def item(self, item_id: str) -> dict[str, Any]:
        """Read an item of a response, by its own id.

        Raises:
            NoSuch: it is not there.
        """
        if (found := _ITEM_ID.fullmatch(item_id)) is not None:
            try:
                items = self.read(f"resp_{found[1]}").items
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

    def make_room(self, num_bytes: int) -> bool:
        """Remove the oldest responses until so many bytes are free; none if all of them have not so many.

        A sixteenth of all goes too where it can: else each further response would need a look at all of them.
        """
        sizes = {name: used_bytes(self._directory(name)) for name in reversed(self.ids())}
        total, freed = sum(sizes.values()), 0
        if total < num_bytes:
            return False
        for response_id, size in sizes.items():
            if freed >= num_bytes and freed + size > num_bytes + total // 16:
                break
            remove_directory(self._directory(response_id))
            freed += size
        return True

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
