"""Batches of one layer's rows to all its workers, and the exchange of one in Python."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.route import Route
from moesaic.errors import MoesaicError
from moesaic.experts.frames import layer_request
from moesaic.experts.wire_rows import to_wire
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.wire import WireDtype
from moesaic.transport.contract import Link, Network
from moesaic.transport.device_memory import mark
from moesaic.transport.frame import Frame

Outcome = Frame | MoesaicError  # of one worker: its reply, or the error that stands for it


@dataclass(frozen=True, kw_only=True)
class RoutedStep(Step):
    """A step, and the route that it pins."""

    route: Route = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class AskedBatch:
    """Rows of one layer of a step.

    Attributes:
        layer: index of the decoder layer.
        rows: ``[T, H]``, where they are sent from.
        wire: the form in which they travel, and sums come back.
        promised: the promises to them; None: none is.
        routing: weights float32 ``[T, k]`` and ids int32 ``[T, k]`` of their experts; None: workers gate them.
        unsummed: results of a row's experts are returned one by one.
        parcels: rows and sums travel between the memories of devices.
    """

    layer: int
    rows: Tensor
    wire: WireDtype = "own"
    promised: PromisedRows | None = None
    routing: tuple[Tensor, Tensor] | None = None
    unsummed: bool = False
    parcels: bool = False

    @cached_property
    def packed(self) -> Tensor:
        """The rows as they travel."""
        return to_wire(self.rows, self.wire).contiguous()


class Sum(NamedTuple):
    """The sum of all replies.

    Attributes:
        rows: float32 ``[T, H]``.
        slowest_s: seconds that the slowest worker took to compute, as it says itself.
    """

    rows: Tensor
    slowest_s: float


class Begun(Protocol):
    """A batch under way."""

    async def settle(self) -> Sum | Sequence[Outcome]:
        """Wait for the answers; at most once.

        Returns:
            Their sum, or one outcome for each worker, in the order of ``Route.targets``.
        """
        ...


@dataclass(frozen=True, eq=False)
class _Calls:
    """The requests of one batch; they are sent when they are settled."""

    network: Network
    calls: list[tuple[Link, Frame]]
    patience_s: float
    written: Callable[[], None] | None  # waits for rows that are parcels

    async def settle(self) -> Sequence[Outcome]:
        """See ``Begun.settle``."""
        if self.written is not None:
            self.written()
            for _, frame in self.calls:
                frame.settled = True
        return await self.network.exchange(self.calls, self.patience_s)


class PythonAsking:
    """Asks in Python: whatever C functions do not send, and where there are none."""

    def __init__(self, network: Network, patience_s: Callable[[int], float]) -> None:
        """Wait as long for replies as ``patience_s`` says, given the number of rows."""
        self._network, self._patience_s = network, patience_s
        self._seq = itertools.count(1)

    def begin(self, step: RoutedStep, batch: AskedBatch) -> _Calls:
        """Make the requests of a batch."""
        route = step.route
        tensors = [batch.packed, route.basis_of(batch.layer), *(batch.routing or ())]
        written = mark(batch.packed.device) if batch.parcels else None
        calls = [
            (
                route.links[idx],
                layer_request(
                    step.step_id,
                    step.epoch,
                    batch.layer,
                    next(self._seq),
                    tensors,
                    promised=batch.promised,
                    unsummed=batch.unsummed,
                    apart=batch.parcels,
                ),
            )
            for idx in route.targets[batch.layer]
        ]
        return _Calls(self._network, calls, self._patience_s(len(batch.rows)), written)
