"""The process that solves: ``python -m services.scheduler.solver``.

It reads questions from standard input and writes answers to standard output, each a msgpack
message after its length (4 bytes, little-endian). Apart from the scheduler, so that a policy that
never ends, takes all memory or crashes can be stopped, and computes at the lowest priority.
"""

import os
import struct
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec
import numpy as np

from moesaic.errors import MoesaicError
from moesaic.placement.aebs import replica_table, schedule_experts
from moesaic.placement.policies import make_placement
from moesaic.placement.problem import Problem
from moesaic.placement.statistics import LayerTraffic
from moesaic.placement.uniform import Slots

LENGTH = struct.Struct("<I")
MAX_REPLAYED = 400  # (batch, layer) pairs
READY = b"R"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A ``LayerTraffic``, as it travels."""

    tokens: bytes
    active_batches: bytes
    coactivation: bytes
    rows: float
    batches: float
    sampled: bytes  # a byte for each expert of each batch

    @classmethod
    def of(cls, layer: LayerTraffic) -> "Traffic":
        """Encode."""
        return cls(
            tokens=layer.tokens.astype("<f8").tobytes(),
            active_batches=layer.active_batches.astype("<f8").tobytes(),
            coactivation=layer.coactivation.astype("<f4").tobytes(),
            rows=layer.rows,
            batches=layer.batches,
            sampled=layer.sampled.astype(np.uint8).tobytes(),
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
            np.frombuffer(self.sampled, np.uint8).reshape(-1, len(tokens)).astype(bool),
        )


class Solve(msgspec.Struct, frozen=True, kw_only=True, tag="solve"):
    """Which slots would these policies fill with what? The one with the best replay wins."""

    policies: list[str]
    slots: list[int]  # per layer, of each instance
    traffic: list[Traffic]
    expert_bytes: int


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """How many experts would the busiest instance compute, in the mean of the sampled batches?"""

    placements: list[list[Slots]]
    traffic: list[Traffic]


class Solved(msgspec.Struct, frozen=True, kw_only=True, tag="solved"):
    """The best placement, which policy made it, and why others made none."""

    slots: list[Slots]
    policy: str
    failures: dict[str, str] = {}


class Replayed(msgspec.Struct, frozen=True, kw_only=True, tag="replayed"):
    """Means in the order of the placements; none without sampled batches."""

    means: list[float]
    batches: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """There is no answer."""

    cause: str


Answer = Solved | Replayed | Failed
questions: "msgspec.msgpack.Decoder[Solve | Replay]" = msgspec.msgpack.Decoder(Solve | Replay)
answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Solved | Replayed | Failed)


def answer(question: Solve | Replay) -> Answer:
    """Solve or replay."""
    traffic = [layer.layer() for layer in question.traffic]
    if isinstance(question, Replay):
        return _replay(question.placements, traffic)
    problem = Problem(
        traffic=tuple(traffic),
        slots=tuple(question.slots),
        expert_bytes=question.expert_bytes,
    )
    made: dict[str, list[Slots]] = {}
    failures = {}
    for policy in question.policies:
        try:
            made[policy] = make_placement(policy, problem)
        except MoesaicError as error:
            failures[policy] = str(error)
    if not made:
        return Failed(cause="; ".join(f"{name}: {cause}" for name, cause in failures.items()))
    means = _replay(list(made.values()), traffic).means
    best = next(iter(made))
    if means:
        best = min(zip(made, means, strict=True), key=lambda pair: pair[1])[0]
    return Solved(slots=made[best], policy=best, failures=failures)


def _replay(placements: list[list[Slots]], traffic: list[LayerTraffic]) -> Replayed:
    """Schedule the latest sampled batches of every layer, as expert workers would."""
    per_layer = max(1, MAX_REPLAYED // max(1, len(traffic)))
    sums, batches = [0.0] * len(placements), 0
    for layer_idx, layer in enumerate(traffic):
        latest = [row.nonzero()[0] for row in layer.sampled[-per_layer:] if row.any()]
        batches += len(latest)
        for which, placement in enumerate(placements):
            replicas = replica_table(placement[layer_idx], len(layer.tokens))
            for active in latest:
                schedule = schedule_experts(active[None, :].astype(np.int32), replicas)
                sums[which] += float(schedule.load.max())
    return Replayed(means=[total / batches for total in sums] if batches else [], batches=batches)


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def main() -> None:
    """Answer until standard input ends."""
    with suppress(OSError):
        os.nice(19)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while (message := _read(sys.stdin.buffer)) is not None:
        try:
            reply: Any = answer(questions.decode(message))
        except Exception as error:  # whatever a solver does, the scheduler gets an answer
            reply = Failed(cause=repr(error))
        payload = msgspec.msgpack.encode(reply)
        sys.stdout.buffer.write(LENGTH.pack(len(payload)) + payload)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
