"""Two networks of a kind, and a link between them."""

from typing import Any

from moesaic.transport.contract import Handler, Link, Network


async def linked(cluster: Any, handler: Handler) -> tuple[Network, Link]:
    """A network, and its link to another one that answers by ``handler``."""
    near, far = cluster.network("near"), cluster.network("far")
    address = await far.listen("127.0.0.1", 0, handler)
    return near, await near.connect(address, "far", 10.0)
