"""Workers that give experts of a share to their peers."""

from dataclasses import dataclass
from typing import Any

from moesaic.dispatch.links import Endpoint, LinkEvents
from moesaic.experts.pull.ranges import Share

PEER_EVENTS = LinkEvents("peer.linked", "peer.unreachable")


@dataclass(frozen=True)
class Peer(Endpoint):
    """A worker that holds a share."""

    share: Share

    @property
    def log_fields(self) -> dict[str, Any]:
        """See ``Endpoint.log_fields``."""
        return {**super().log_fields, "share": str(self.share)}
