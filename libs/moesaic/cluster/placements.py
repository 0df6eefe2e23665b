"""Translation between a placement's wire form (``placement.proto``) and its document form."""

import msgspec

from moesaic.cluster.wire import filled
from moesaic.errors import InvalidInput
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.substitution import Substitution
from moesaic.v1 import placement_pb2 as pb


def encode_placement(placement: Placement) -> pb.Placement:
    """Write a placement in its wire form."""
    return pb.Placement(
        epoch=placement.epoch,
        model_digest=placement.model_digest,
        num_experts=placement.num_experts,
        num_united=placement.num_united,
        substitution=filled(pb.Substitution, placement.substitution),
        traceparent=placement.traceparent,
        workers=[filled(pb.PlacedWorker, worker) for worker in placement.workers],
        layers=[
            pb.PlacedLayer(
                layer=layer, workers=[pb.SlotList(expert_ids=experts) for experts in slots]
            )
            for layer, slots in zip(placement.layers, placement.slots, strict=True)
        ],
    )


def decode_placement(wire: pb.Placement) -> Placement:
    """Read a placement from its wire form.

    Raises:
        InvalidInput: its parts do not fit together.
    """
    if wire.epoch < 1 or wire.num_experts <= wire.num_united:
        raise InvalidInput("placement.epoch", "epoch and num_experts must be at least 1")
    return Placement(
        epoch=wire.epoch,
        model_digest=wire.model_digest,
        num_experts=wire.num_experts,
        num_united=wire.num_united,
        substitution=_decode_substitution(wire),
        traceparent=wire.traceparent,
        workers=[PlacedWorker.of(worker) for worker in wire.workers],
        layers=[layer.layer for layer in wire.layers],
        slots=[[list(slots.expert_ids) for slots in layer.workers] for layer in wire.layers],
    ).checked()


def _decode_substitution(wire: pb.Placement) -> Substitution:
    told = wire.substitution
    # It was told nothing.
    if not told.instead and not wire.num_united:
        return Substitution()
    try:
        return msgspec.convert(
            {"way": told.way, "instead": told.instead, "rule": told.rule}, type=Substitution
        )
    except msgspec.ValidationError as error:
        raise InvalidInput("placement.substitution", str(error)) from error
