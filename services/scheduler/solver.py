"""The process that solves: ``python -m services.scheduler.solver``.

It reads questions from standard input and writes answers to standard output, each a msgpack
message after its length (4 bytes, little-endian). Apart from the scheduler, so that a policy that
never ends or crashes can be stopped, and computes at the lowest priority. Its two seconds are of
the processor's time: where much is served, it waits.
"""

import os
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import POLICIES as SCHEDULINGS
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.policies import make_placement
from moesaic.placement.problem import Problem
from moesaic.placement.replay import replay
from moesaic.placement.stability import settle
from moesaic.placement.statistics import SAMPLED_ITEM, LayerTraffic
from moesaic.placement.uniform import Slots

LENGTH = struct.Struct("<I")
CPU_S = 2.0  # for one question
REPLAY_S = 1.2  # of them: where batches take long, fewer are replayed
ABANDONED_S = 120  # of real time, for one whose asker may be gone
MAX_REPLAYED = 400  # (batch, layer) pairs, the latest
READY = b"R"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """A ``LayerTraffic``, as it travels."""

    tokens: bytes
    active_batches: bytes
    coactivation: bytes
    rows: float
    batches: float
    sampled: bytes  # rows of each expert of each batch, uint16

    @classmethod
    def of(cls, layer: LayerTraffic) -> "Traffic":
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
    """What would this policy have instances hold?"""

    policy: str
    slots: list[int]  # per layer, of each instance
    held: list[Slots]
    traffic: list[Traffic]
    expert_bytes: int


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """How much would the busiest instance have to do, in the mean of the sampled batches?"""

    placements: list[list[Slots]]
    traffic: list[Traffic]
    scheduling: str = "aebs-memory-bound"
    ridges: list[int] = []  # ``ridge_rows`` of the workers


class Solved(msgspec.Struct, frozen=True, kw_only=True, tag="solved"):
    """The placement, its experts where most of them are already."""

    slots: list[Slots]


class Replayed(msgspec.Struct, frozen=True, kw_only=True, tag="replayed"):
    """Means in the order of the placements; none without sampled batches."""

    activated: list[float]  # experts on the instance that has most of them
    loads: list[float]  # of the instance that has most to do, as workers reckon it
    batches: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """There is no answer."""

    cause: str


Answer = Solved | Replayed | Failed
questions: "msgspec.msgpack.Decoder[Solve | Replay]" = msgspec.msgpack.Decoder(Solve | Replay)
answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Solved | Replayed | Failed)


def answer(question: Solve | Replay) -> Answer:
    """Solve or replay. Policies see one half of the sampled batches, and are judged by the other.

    Raises:
        MoesaicError: the policy that was asked for makes no placement.
    """
    traffic = [layer.layer() for layer in question.traffic]
    if isinstance(question, Replay):
        return _replayed(question, [layer.sampled[1::2] for layer in traffic])
    seen = tuple(replace(layer, sampled=layer.sampled[::2]) for layer in traffic)
    problem = Problem(traffic=seen, slots=tuple(question.slots), expert_bytes=question.expert_bytes)
    return Solved(slots=settle(question.held, make_placement(question.policy, problem)))


def _replayed(question: Replay, batches: list[NDArray[np.uint16]]) -> Replayed:
    latest = max(1, MAX_REPLAYED // max(1, len(batches)))
    until_s = time.process_time() + REPLAY_S
    found = replay(
        question.placements,
        [rows[-latest:] for rows in batches],
        _known(question.scheduling),
        question.ridges,
        lambda: time.process_time() < until_s,
    )
    if not found or not found[0].batches:
        return Replayed(activated=[], loads=[], batches=0)
    return Replayed(
        activated=[one.max_activated for one in found],
        loads=[one.max_load for one in found],
        batches=found[0].batches,
    )


def _known(scheduling: str) -> ExpertScheduling:
    """The policy of that name; one of a newer worker is taken as the paper's."""
    return next((known for known in SCHEDULINGS if known == scheduling), "aebs-memory-bound")


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
        # Not handled, these signals end the process, whatever it is in the middle of.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        signal.alarm(ABANDONED_S)
        try:
            reply: Any = answer(questions.decode(message))
        except Exception as error:  # whatever a solver does, the scheduler gets an answer
            reply = Failed(cause=repr(error))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.alarm(0)
        payload = msgspec.msgpack.encode(reply)
        sys.stdout.buffer.write(LENGTH.pack(len(payload)) + payload)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
