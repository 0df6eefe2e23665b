"""The promise of everything that carries rows to experts in another way than directly."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from torch import Tensor

from moesaic.costs import CostBook
from moesaic.dispatch.routed.route import Route


class RowCarrier(Protocol):
    """Another way for rows to travel than directly to every expert worker."""

    @property
    def book(self) -> CostBook:
        """Costs of links that it has measured."""
        ...

    def goes_directly(self, route: Route, layers: Iterable[int], /) -> bool:
        """True if there is no other way for any of these layers, as the workers stand now."""
        ...

    def count_directly(self, route: Route, layers: Iterable[int], /) -> None:
        """Note that a batch of each of these layers has gone directly."""
        ...

    async def dispatch(
        self,
        route: Route,
        layer: int,
        hidden: Tensor,
        direct: Callable[[], Awaitable[Tensor]],
        step_id: bytes,
        /,
    ) -> Tensor:
        """The sum of every row's experts, float32 ``[T, H]``.

        Args:
            route: of the step's placement.
            layer: index of the decoder layer.
            hidden: ``[T, H]``, on the CPU.
            direct: sends these rows directly instead.
            step_id: of the step, which may have several batches under way.
        """
        ...

    async def close(self) -> None:
        """Drop all links."""
        ...
