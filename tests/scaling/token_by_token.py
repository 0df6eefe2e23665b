"""The oracle of replays: every step of every worker, one after the other, and every row by itself."""

import math
from dataclasses import dataclass, field

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, RecentDemand, ServingLimits, StepRows, StepTimes


@dataclass
class Sequence:
    """A request: when it came, and what it has so far."""

    at_s: float
    prompt: int
    answer: int
    is_counted: bool
    computed: int = 0
    tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass
class Worker:
    """Sequences of one worker, and the end of its step; no step: it is idle since then."""

    free_s: float = -math.inf
    chunks: list[tuple[Sequence, int]] | None = None
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)


def expected_latencies(
    demand: RecentDemand,
    shape: FleetShape,
    times: StepTimes,
    limits: ServingLimits,
    objectives: Objectives,
    headroom: float,
) -> tuple[float, list[float], list[float]]:
    """Simulate; return attainment, times to first tokens, and times of later tokens."""
    end_s = demand.window_s / headroom
    rows = list(zip(demand.at_s, demand.prompt_tokens, demand.answer_tokens, strict=True))
    answers = [int(row[2]) for row in rows]
    lived_s = 0.0
    if answers:
        biased = sum(a * a for a in answers) / sum(answers)
        lived_s = min(demand.window_s, objectives.ttft_s + objectives.tpot_s * biased)
    early = [(at / headroom - end_s, p, a, False) for at, p, a in rows]
    early = [row for row in early if row[0] >= -lived_s / headroom]
    sequences = [
        Sequence(float(at), int(p), int(a), counted)
        for at, p, a, counted in [*early, *((at / headroom, p, a, True) for at, p, a in rows)]
    ]
    workers = [Worker() for _ in range(shape.attention)]
    arrivals = list(sequences)
    while True:
        ends = [worker.free_s for worker in workers if worker.chunks is not None]
        events = ends + [each.at_s for each in arrivals[:1]]
        if not events:
            break
        now_s = min(events)
        for worker in workers:
            if worker.chunks is not None and worker.free_s <= now_s:
                _finish(worker, now_s)
        while arrivals and arrivals[0].at_s <= now_s:
            chosen = min(workers, key=lambda worker: len(worker.running) + len(worker.waiting))
            chosen.waiting.append(arrivals.pop(0))
        for worker in workers:
            if worker.chunks is None and now_s < end_s:
                _begin(worker, now_s, times, shape, limits)
    counted = [each for each in sequences if each.is_counted]
    ttft_s = [(end_s if s.first_s is None else s.first_s) - s.at_s for s in counted]
    late = sum(
        ttft > objectives.ttft_s or (s.tpot_s or 0.0) > objectives.tpot_s
        for s, ttft in zip(counted, ttft_s, strict=True)
    )
    attainment = 1 - late / len(counted) if counted else 1.0
    return attainment, ttft_s, [s.tpot_s for s in counted if s.tpot_s is not None]


def _begin(
    worker: Worker, now_s: float, times: StepTimes, shape: FleetShape, limits: ServingLimits
) -> None:
    answering = [(s, 1) for s in worker.running if s.tokens]
    budget = limits.max_num_batched_tokens - len(answering)
    chunks = answering + _prompts(worker, budget, limits)
    if not chunks:
        return
    seconds = times.step(_rows(chunks, len(answering)), shape).seconds
    if len(chunks) > len(answering) and 0 < limits.step_target_s < seconds:
        alone = StepRows(0, len(answering), sum(s.computed + 1 for s, _ in answering))
        alone_s = times.step(alone, shape).seconds
        room_s = max(limits.step_target_s - alone_s, alone_s if answering else 2 * alone_s)
        rows = sum(rows for _, rows in chunks[len(answering) :])
        fewer = max(64, int(rows * room_s / (seconds - alone_s)))
        chunks = answering + _prompts(worker, min(rows, fewer), limits)
        seconds = times.step(_rows(chunks, len(answering)), shape).seconds
    worker.chunks, worker.free_s = chunks, now_s + seconds


def _prompts(worker: Worker, budget: int, limits: ServingLimits) -> list[tuple[Sequence, int]]:
    chunks: list[tuple[Sequence, int]] = []
    for sequence in [s for s in worker.running if not s.tokens]:
        if budget:
            chunks.append((sequence, min(budget, sequence.prompt - sequence.computed)))
            budget -= chunks[-1][1]
    while worker.waiting and budget:
        sequence = worker.waiting[0]
        held = sum(s.prompt + s.answer for s in worker.running)
        fits = held + sequence.prompt + sequence.answer <= limits.kv_tokens
        if len(worker.running) == limits.max_num_seqs or (worker.running and not fits):
            break
        worker.running.append(worker.waiting.pop(0))
        chunks.append((sequence, min(budget, sequence.prompt)))
        budget -= chunks[-1][1]
    return chunks


def _rows(chunks: list[tuple[Sequence, int]], answers: int) -> StepRows:
    seen = [sum(s.computed + i + 1 for i in range(rows)) for s, rows in chunks]
    num_rows = sum(rows for _, rows in chunks)
    return StepRows(num_rows - answers, answers, sum(seen[:answers]), sum(seen[answers:]))


def _finish(worker: Worker, now_s: float) -> None:
    for sequence, rows in worker.chunks or []:
        sequence.computed += rows
        if sequence.computed >= sequence.prompt:
            sequence.tokens += 1
            sequence.last_s = now_s
            if sequence.first_s is None:
                sequence.first_s = now_s
            if sequence.tokens == sequence.answer:
                worker.running.remove(sequence)
    worker.chunks = None
