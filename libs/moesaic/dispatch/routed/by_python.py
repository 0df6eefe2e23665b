"""Exchanges in Python: of whatever C functions do not send, and where there are none."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.dispatch.routed.asking import AskedBatch, Outcome, RoutedStep
from moesaic.experts.frames import layer_request
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame


@dataclass(frozen=True, eq=False)
class _Calls:
    """The requests of one batch; they are sent when they are settled."""

    network: Network
    calls: list[tuple[Link, Frame]]
    patience_s: float

    async def settle(self) -> Sequence[Outcome]:
        """See ``Begun.settle``."""
        return await self.network.exchange(self.calls, self.patience_s)


class PythonAsking:
    """An ``Asking`` that takes every batch."""

    def __init__(self, network: Network, patience_s: Callable[[int], float]) -> None:
        """Wait as long for replies as ``patience_s`` says, given the number of rows."""
        self._network, self._patience_s = network, patience_s
        self._seq = itertools.count(1)

    def begin(self, step: RoutedStep, batch: AskedBatch) -> _Calls:
        """See ``Asking.begin``."""
        route = step.route
        tensors = [batch.packed, route.basis_of(batch.layer), *(batch.routing or ())]
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
        return _Calls(self._network, calls, self._patience_s(len(batch.rows)))
