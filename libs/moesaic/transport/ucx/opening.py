"""The one place that opens a network of a service."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.messages.registry import Role
from moesaic.settings import ModelSettings, Place
from moesaic.transport.contract import Handler
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.network import UcxNetwork

RunOnLoop = Callable[[Any], Awaitable[Any]]  # awaits a coroutine on the network's event loop


@dataclass(frozen=True)
class OpenNetwork:
    """A network on an event loop of its own, as other loops see it."""

    network: UcxNetwork
    run: RunOnLoop
    place: Place

    async def listen(self, port: int, handler: Handler) -> str:
        """Serve peers.

        Args:
            port: 0 takes a free one.
            handler: answers them, on the network's event loop.

        Returns:
            The address that others dial, ``host:port``.

        Raises:
            InUse: the address cannot be listened on.
        """
        bound = await self.run(self.network.listen(self.place.host, port, handler))
        return self.place.advertised(bound)


@asynccontextmanager
async def open_network(
    settings: ModelSettings,
    role: Role,
    digest: str,
    limits: FrameLimits,
    run: RunOnLoop,
    device: torch.device | None = None,
) -> AsyncIterator[OpenNetwork]:
    """Open a network for the length of the block.

    Args:
        settings: settings with the worker id, and an address of this machine for tensors.
        role: role of the worker.
        digest: digest of its configuration and weights.
        limits: the largest frames to believe.
        run: awaits a coroutine on the event loop that the network shall live on.
        device: device of tensors. From a GPU they travel as parcels, if the peer can take them.
            On a CPU that would only cost: C functions exchange frames there, and know no parcels.

    Raises:
        InvalidInput: this machine does not offer the transports, or has no such address.
    """

    async def construct() -> UcxNetwork:
        return UcxNetwork(
            settings.worker_id,
            role,
            settings.secret.get_secret_value().encode(),
            limits,
            transports=settings.transports,
            own_address=settings.data.host,
            private=settings.private_network,
            device=device if device is not None and device.type != "cpu" else None,
            weights=settings.weights_of(digest),
        )

    network = await run(construct())
    try:
        yield OpenNetwork(network, run, settings.data)
    finally:
        await run(network.close())
