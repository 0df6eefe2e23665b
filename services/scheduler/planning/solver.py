"""The process that solves: ``python -m moesaic.services.scheduler.planning.solver``.

It reads questions from standard input and writes answers to standard output; see ``messages``. It
is a process of its own, so that a policy that hangs or crashes can be stopped. It computes at the
lowest priority. Its limits are of processor time: on a busy machine it waits.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import SCHEDULINGS, ExpertScheduling
from moesaic.placement.evaluation.replay import replay
from moesaic.placement.evaluation.stability import settle
from moesaic.placement.policies import make_placement
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.traffic.statistics import LayerTraffic
from moesaic.services.scheduler.planning.messages import (
    LENGTH,
    READY,
    Answer,
    Failed,
    Question,
    Replay,
    Replayed,
    Solved,
    SolveSites,
    questions,
)

CPU_S = 2.0  # for one question
SITES_CPU_S = 40.0  # for edge servers: the exact optimum of 64 with 15,360 experts may take 15 s
REPLAY_S = 1.2  # of them: where batches take long, fewer are replayed
ABANDONED_S = 120  # of real time: the scheduler may be gone
MAX_REPLAYED = 400  # (batch, layer) pairs, the latest


def answer(question: Question) -> Answer:
    """Solve or replay. Policies see one half of the sampled batches; the other half is replayed.

    Raises:
        MoesaicError: the policy that was asked for makes no placement.
    """
    if isinstance(question, SolveSites):
        return Solved(slots=make_placement(question.policy, _problem_of(question)))
    traffic = [layer.layer() for layer in question.traffic]
    if isinstance(question, Replay):
        return _replayed(question, [layer.sampled[1::2] for layer in traffic])
    seen = tuple(replace(layer, sampled=layer.sampled[::2]) for layer in traffic)
    problem = PlacementProblem(
        traffic=seen, slots=tuple(question.slots), expert_bytes=question.expert_bytes
    )
    return Solved(slots=settle(question.held, make_placement(question.policy, problem)))


def _problem_of(question: SolveSites) -> PlacementProblem:
    """The problem of edge agents; policies that know no origins see the traffic of all of them."""
    shape = len(question.memory), question.num_layers, question.num_experts
    demand = np.frombuffer(question.demand, "<f8").reshape(shape)
    nothing = LayerTraffic.none(question.num_experts)
    # Co-activation is not known by origin, and batches are not; rows stand for both.
    traffic = tuple(
        replace(nothing, tokens=rows, active_batches=rows, rows=float(rows.sum()), batches=1.0)
        for rows in demand.sum(axis=0)
    )
    return PlacementProblem(
        traffic=traffic,
        slots=(question.num_experts,) * len(question.memory),
        demand=demand,
        remote_cost=np.array(question.remote_cost),
        expert_bytes=question.expert_bytes,
        memory=tuple(tuple(devices) for devices in question.memory),
        held=question.held,
    )


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
    """The scheduling of that name; an unknown one, of a newer worker, counts as ``aebs-memory-bound``."""
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
        # Not handled, these signals end the process in the middle of anything.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        signal.alarm(ABANDONED_S)
        try:
            question = questions.decode(message)
            if isinstance(question, SolveSites):
                signal.setitimer(signal.ITIMER_VIRTUAL, SITES_CPU_S)
            reply: Any = answer(question)
        except Exception as error:  # the scheduler gets an answer in any case
            reply = Failed(cause=repr(error))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.alarm(0)
        payload = msgspec.msgpack.encode(reply)
        sys.stdout.buffer.write(LENGTH.pack(len(payload)) + payload)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
