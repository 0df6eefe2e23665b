"""Choices of the gates on one worker during one window, as expert workers report them to the scheduler."""

from typing import Annotated

import msgspec

from moesaic.messages.bounds import Amount, Name

MAX_SENT_PAIRS = 512  # of one layer; every pair of up to 32 experts
MAX_SAMPLED_BATCHES = 32  # of one layer

# ``moesaic.placement.traffic.statistics`` bounds their sums.
Count = Annotated[int, msgspec.Meta(ge=0)]


class LayerActivations(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's part of a window.

    Pairs are of distinct experts that rows chose together, the most frequent ones first. Pairs beyond
    ``MAX_SENT_PAIRS`` count in ``pair_total`` only.
    """

    layer: Count  # decoder layer
    rows: Count
    batches: Count  # dispatch batches
    tokens: list[Count]  # [E]: rows that chose the expert
    active_batches: list[Count]  # [E]: batches in which any row did
    pair_first: list[Count] = []  # the lower expert of each pair
    pair_second: list[Count] = []
    pair_count: list[Count] = []  # rows that chose both
    pair_total: Count = 0  # rows over all pairs, counted and sent or not
    sampled: list[bytes] = []  # batches, evenly chosen: rows of every expert, little-endian uint16


class ActivationWindow(msgspec.Struct, frozen=True, kw_only=True, tag="activation.v2"):
    """Batches of one worker since its last window; every dispatch batch is in one worker's only."""

    worker_id: Name
    generation: Count
    model_digest: Name
    num_experts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    epoch: Count  # of the placement in force at the end
    window_s: Amount  # measured by the sender
    layers: list[LayerActivations]


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
