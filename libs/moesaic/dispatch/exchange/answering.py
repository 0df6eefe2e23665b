"""What another worker offers, read from its request, and what it is answered."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dispatch.exchange.orders import Offer, Verdict, encode, order_of
from moesaic.dispatch.exchange.sending import Reach
from moesaic.errors import InvalidInput, NotReady, StaleEpoch
from moesaic.transport.frame import Frame


@dataclass(frozen=True)
class Offered:
    """Rows of another worker."""

    order: Offer
    hidden: Tensor
    reach: Reach  # of this worker, to the same expert workers

    @classmethod
    def read(cls, request: Frame, reach_of: Callable[[int], Reach | None]) -> "Offered":
        """What ``request`` offers.

        Raises:
            InvalidInput: the request is something else.
            StaleEpoch: this worker does not use the epoch.
            NotReady: it reaches other expert workers.
        """
        order = order_of(request)
        if not isinstance(order, Offer) or len(request.tensors) != 2:
            raise InvalidInput("frame.body", "must offer rows")
        reach = reach_of(request.epoch)
        if reach is None:
            raise StaleEpoch(request.epoch, 0)
        hidden, terms = request.tensors
        known = request.layer in reach.targets
        if not (known and torch.equal(terms, reach.terms_of(request.layer))):
            raise NotReady("this worker reaches other expert workers")
        return cls(order, hidden, reach)


def answer_to(request: Frame, verdict: Verdict, sums: Tensor | None = None) -> Frame:
    """The reply: sums of the rows, or none, and what to do with the next ones."""
    return request.reply(
        tensors=[] if sums is None else [sums],
        body=encode(verdict),
    )
