"""How much of a tenant's is computed at once: its requests take places for their works, in turn."""

from typing import Protocol


class Taker(Protocol):
    """A request that takes places."""

    def wake(self) -> None:
        """It is worth trying again to take one."""
        ...


class Places:
    """Some places, or as many as anyone takes."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._held: dict[Taker, int] = {}
        self._wanting: dict[Taker, None] = {}  # who was refused one last, by time

    @property
    def most(self) -> int | None:
        """How many there are; None: as many as anyone takes. More of them wake who wants one."""
        return self._most

    @most.setter
    def most(self, most: int | None) -> None:
        self._most = most
        self._wake()

    def take(self, taker: Taker) -> bool:
        """Take a place; false: not now, and ``taker.wake`` is called later. One is left for whoever
        wants one and has fewer."""
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
        """One work of ``taker``, which has a place, is over."""
        self._held[taker] -= 1
        self._wake()

    def leave(self, taker: Taker) -> None:
        """``taker`` takes no more places and has given back all."""
        assert not self._held.pop(taker, 0)
        self._wanting.pop(taker, None)
        self._wake()

    def _is_free(self, count: int) -> bool:
        return self.most is None or sum(self._held.values()) + count <= self.most

    def _wake(self) -> None:
        if self._is_free(1):
            for taker in self._wanting:
                taker.wake()
