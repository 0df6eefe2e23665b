"""What an expert worker tells the scheduler about the batches it counted."""

from typing import Annotated

import msgspec

from moesaic.messages.activation import ActivationWindow, Count


class ServedBatches(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly the batches of one epoch were served, over all layers."""

    epoch: Count
    batches: Count  # dispatch batches, each of one layer
    busiest: Count  # sum of the most activated experts on one worker in each of them


class ActivationReport(msgspec.Struct, frozen=True, kw_only=True, tag="activation-report.v2"):
    """One window: what was chosen, and who had to compute it."""

    window: ActivationWindow
    served: Annotated[list[ServedBatches], msgspec.Meta(max_length=64)] = []
    dropped: Count = 0  # windows that could not be sent since the last one that was
    scheduling: str = "aebs"  # how replicas were chosen, of the last batch
