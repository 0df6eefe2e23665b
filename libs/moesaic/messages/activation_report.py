"""Reports of expert workers to the scheduler about the batches they counted."""

from typing import Annotated

import msgspec

from moesaic.messages.activation import ActivationWindow, Count
from moesaic.messages.bounds import Name


class ServedBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Evenness of serving the batches of one epoch, over all layers."""

    epoch: Count
    batches: Count  # dispatch batches, each of one layer
    busiest: Count  # sum of the most activated experts on one worker in each of them


class ActivationReport(msgspec.Struct, frozen=True, kw_only=True, tag="activation-report.v2"):
    """One window: the experts chosen, and how evenly workers computed them."""

    window: ActivationWindow
    served: Annotated[list[ServedBatches], msgspec.Meta(max_length=64)] = []
    dropped: Count = 0  # windows that could not be sent since the last one that was
    scheduling: Name = "aebs"  # the way in which replicas were chosen, for the last batch
