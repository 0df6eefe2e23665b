"""Places: bounds of what is computed at once for a tenant, whose requests take them in turn."""

from typing import Protocol


class Taker(Protocol):
    """A request that takes places."""

    def wake(self) -> None:
        """Try again: a place may be free."""
        ...


class Places:
    """Places for runs: some, or as many as anyone takes."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._held: dict[Taker, int] = {}
        self._wanting: dict[Taker, None] = {}  # refused one last, by time

    @property
    def most(self) -> int | None:
        """Number of places; None: as many as anyone takes. A higher one wakes those that want one."""
        return self._most

    @most.setter
    def most(self, most: int | None) -> None:
        self._most = most
        self._wake()

    def take(self, taker: Taker) -> bool:
        """Take a place; one is left for a taker that wants one and has fewer.

        Returns:
            False: not now; ``taker.wake`` is called later.
        """
        held = self._held.get(taker, 0)
        poorer = any(
            self._held.get(other, 0) < held for other in self._wanting if other is not taker
        )
        if not self._is_free(2 if poorer else 1):
            self._wanting[taker] = None
            return False
        self._wanting.pop(taker, None)
        self._held[taker] = held + 1
        self._wake()
        return True

    def give_back(self, taker: Taker) -> None:
        """Give a place of ``taker`` back: one of its runs has ended."""
        self._held[taker] -= 1
        self._wake()

    def leave(self, taker: Taker) -> None:
        """Forget ``taker``, which has given all its places back."""
        assert not self._held.pop(taker, 0)
        self._wanting.pop(taker, None)
        self._wake()

    def _is_free(self, count: int) -> bool:
        return self.most is None or sum(self._held.values()) + count <= self.most

    def _wake(self) -> None:
        if self._is_free(1):
            for taker in self._wanting:
                taker.wake()
