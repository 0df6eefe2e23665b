"""Messages between the scheduler and its solver.

Each travels as msgpack after its length (``LENGTH``: 4 bytes, little-endian).
"""

import struct

import msgspec
import numpy as np

from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import SAMPLED_ITEM, LayerTraffic

LENGTH = struct.Struct("<I")
READY = b"R"  # from the solver, before its first answer


class SentTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """A ``LayerTraffic`` as bytes and numbers."""

    tokens: bytes
    active_batches: bytes
    coactivation: bytes
    rows: float
    batches: float
    sampled: bytes  # rows of each expert of each batch, uint16

    @classmethod
    def of(cls, layer: LayerTraffic) -> "SentTraffic":
        """Encode."""
        return cls(
            tokens=layer.tokens.astype("<f8").tobytes(),
            active_batches=layer.active_batches.astype("<f8").tobytes(),
            coactivation=layer.coactivation.astype("<f4").tobytes(),
            rows=layer.rows,
            batches=layer.batches,
            sampled=layer.sampled.astype(SAMPLED_ITEM).tobytes(),
        )

    def layer(self) -> LayerTraffic:
        """Decode."""
        tokens = np.frombuffer(self.tokens, "<f8")
        square = np.frombuffer(self.coactivation, "<f4").reshape(len(tokens), len(tokens))
        return LayerTraffic(
            tokens,
            np.frombuffer(self.active_batches, "<f8"),
            square,
            self.rows,
            self.batches,
            np.frombuffer(self.sampled, SAMPLED_ITEM).reshape(-1, len(tokens)),
        )


class Solve(msgspec.Struct, frozen=True, kw_only=True, tag="solve"):
    """A question: the placement that a policy proposes."""

    policy: str
    slots: list[int]  # per layer, of each instance
    held: list[Slots]
    traffic: list[SentTraffic]
    expert_bytes: int


class SolveSites(msgspec.Struct, frozen=True, kw_only=True, tag="solve-sites"):
    """A question: the placement that a policy proposes for edge agents with traffic of their own."""

    policy: str
    held: list[Slots]
    memory: list[list[int]]  # bytes for experts, of each instance and device
    demand: bytes  # rows per second by origin, layer and expert: float64 [N, L, E]
    remote_cost: list[float]  # seconds of a row to another instance, of each origin
    num_layers: int
    num_experts: int
    expert_bytes: int


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """A question: the mean work of the busiest instance over the sampled batches, by placement."""

    placements: list[list[Slots]]
    traffic: list[SentTraffic]
    scheduling: str = "aebs-memory-bound"
    ridges: list[int] = []  # ``ridge_rows`` of the workers


class Solved(msgspec.Struct, frozen=True, kw_only=True, tag="solved"):
    """The answer to ``Solve`` or ``SolveSites``: the policy's placement, arranged so that least has to be loaded."""

    slots: list[Slots]


class Replayed(msgspec.Struct, frozen=True, kw_only=True, tag="replayed"):
    """The answer to ``Replay``: means in the order of the placements; none without sampled batches."""

    activated: list[float]  # experts on the instance that has most of them
    loads: list[float]  # of the instance that has most to do, as workers reckon it
    batches: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The answer to a question that could not be answered."""

    cause: str


Answer = Solved | Replayed | Failed
Question = Solve | SolveSites | Replay
questions: "msgspec.msgpack.Decoder[Question]" = msgspec.msgpack.Decoder(
    Solve | SolveSites | Replay
)
answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Solved | Replayed | Failed)
