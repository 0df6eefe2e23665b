"""Compiled grammars that are kept. Pure.

Tenants share the room: when it is full, the tenant that holds the most gives up what it has not used
for the longest time. So nobody's flood drives out the grammars of others.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")
Source = tuple[str, str]  # kind and text


class GrammarCache(Generic[V]):
    """Values by their source, in at most ``most_bytes``. A value counts for every tenant that uses it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: dict[Source, tuple[V, int]] = {}
        self._used_by: dict[str, OrderedDict[Source, None]] = {}  # the latest use comes last

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(num_bytes for _, num_bytes in self._values.values())

    def get(self, source: Source, tenant: str) -> V | None:
        """Find a value, which ``tenant`` uses now."""
        if source not in self._values:
            return None
        self._use(source, tenant)
        return self._values[source][0]

    def put(self, source: Source, tenant: str, value: V, num_bytes: int) -> None:
        """Keep a value, as long as there is room."""
        self._values[source] = value, num_bytes
        self._use(source, tenant)
        while self.num_bytes > self._most_bytes:
            self._give_up(max(self._used_by, key=self._held_by))

    def _use(self, source: Source, tenant: str) -> None:
        used = self._used_by.setdefault(tenant, OrderedDict())
        used[source] = None
        used.move_to_end(source)

    def _held_by(self, tenant: str) -> int:
        return sum(self._values[source][1] for source in self._used_by[tenant])

    def _give_up(self, tenant: str) -> None:
        used = self._used_by[tenant]
        source, _ = used.popitem(last=False)
        if not used:
            del self._used_by[tenant]
        if not any(source in others for others in self._used_by.values()):
            del self._values[source]
