"""A queue in front of an engine that batches continuously, to see what a policy makes of a load.

A step computes a row for each answer under way, and prompts as far as there is room. Its time is
``own + prompt * rows + answer * rows``, over ``1 + gain * (1 - threshold)`` of the phase, times noise.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moesaic.brownout.control.contract import QueueState, StepTaken
from moesaic.brownout.control.ladder import Ladder, LadderState
from moesaic.errors import Overloaded
from moesaic.messages.brownout import BrownoutPolicy

DECIDE_EVERY_S = 0.05


@dataclass
class Arrival:
    """A request: when it comes, the rows of its prompt, the tokens of its answer."""

    at_s: float
    prompt: int
    answer: int
    exact: bool = False
    began: bool = False  # so did its first step
    left: int = 0
    made: int = 0
    last_s: float = 0.0
    ttft_s: float | None = None  # none: it was refused, or the end came first
    tpot_s: list[float] = field(default_factory=list)
    refused: bool = False


@dataclass(frozen=True)
class Engine:
    """How long steps take; by default 80 % of the time goes into prompts."""

    own_s: float = 0.008
    prompt_s: float = 0.0001
    answer_s: float = 0.0004
    gain: float = 0.3
    decode_gain: float | None = None  # none: as ``gain``
    noise: float = 0.05
    step_rows: int = 512
    most_answers: int = 128


USUAL = Engine()


@dataclass
class Outcome:
    """What became of a run."""

    requests: list[Arrival]
    states: list[tuple[float, LadderState]]

    def _late(self, requests: Iterable[Arrival], policy: BrownoutPolicy) -> dict[str, float]:
        requests = list(requests)
        served = [r for r in requests if r.ttft_s is not None]
        gaps = [gap for r in served for gap in r.tpot_s]
        return {
            "ttft": float(np.mean([r.ttft_s > policy.slo_ttft_s for r in served]))
            if served
            else 0.0,
            "tpot": float(np.mean([gap > policy.slo_tpot_s for gap in gaps])) if gaps else 0.0,
            "refused": float(np.mean([r.refused for r in requests])) if requests else 0.0,
            "late or refused": float(
                np.mean([r.ttft_s is None or r.ttft_s > policy.slo_ttft_s for r in requests])
            ),
        }

    def violations(
        self, policy: BrownoutPolicy, since_s: float = 0.0, until_s: float = 1e9
    ) -> dict[str, float]:
        """Shares of the requests that came in a time, and of their tokens, that were late."""
        return self._late([r for r in self.requests if since_s <= r.at_s < until_s], policy)

    def back_to_exact_s(self, since_s: float) -> float:
        """Seconds from ``since_s`` on until both thresholds are 1 for two seconds."""
        exact_since_s = None
        for at, state in self.states:
            if at < since_s or min(state.thresholds) < 1:
                exact_since_s = None
            elif exact_since_s is None:
                exact_since_s = at
            elif at >= exact_since_s + 2.0:
                return exact_since_s - since_s
        return float("inf")

    def turns(self) -> int:
        """Number of times that a threshold changed its direction."""
        found = 0
        for phase in (0, 1):
            series = np.array([state.thresholds[phase] for _, state in self.states])
            signs = np.sign(np.diff(series))
            signs = signs[signs != 0]
            found += int((signs[1:] != signs[:-1]).sum())
        return found

    def mean_threshold(self, since_s: float, until_s: float) -> float:
        """Mean over the decisions of a time, of both phases."""
        found = [np.mean(state.thresholds) for at, state in self.states if since_s <= at < until_s]
        return float(np.mean(found))


def poisson(
    rates: list[tuple[float, float]],
    *,
    seed: int = 0,
    prompt: int = 200,
    answer: int = 30,
    exact_share: float = 0.0,
) -> list[Arrival]:
    """Requests at random; ``rates`` are (until_s, requests per second), one after the other."""
    random = np.random.default_rng(seed)
    now_s, out = 0.0, []
    for until_s, rate in rates:
        while True:
            now_s += random.exponential(1 / rate)
            if now_s >= until_s:
                now_s = until_s
                break
            rows = max(8, int(random.gamma(4, prompt / 4)))
            tokens = max(2, int(random.gamma(4, answer / 4)))
            out.append(Arrival(now_s, rows, tokens, bool(random.random() < exact_share)))
    return out


def run(
    policy: BrownoutPolicy, requests: list[Arrival], engine: Engine = USUAL, *, seed: int = 1
) -> Outcome:
    """Serve requests to the last one's end."""
    random, ladder = np.random.default_rng(seed), Ladder(policy)
    coming, waiting, answering = deque(requests), deque[Arrival](), list[Arrival]()
    now_s, decided_s, states = 0.0, -1.0, list[tuple[float, LadderState]]()
    while coming or waiting or answering:
        if not waiting and not answering:
            now_s = max(now_s, coming[0].at_s)
        while coming and coming[0].at_s <= now_s:
            request = coming.popleft()
            ladder.arrivals.add(request.at_s, request.prompt)
            try:
                ladder.admit(exact=request.exact)
            except Overloaded:
                request.refused = True
                if not waiting and not answering:
                    break
                continue
            request.left = request.prompt
            waiting.append(request)
        if now_s >= decided_s + DECIDE_EVERY_S:
            decided_s = now_s
            oldest = next((r.at_s for r in waiting if not r.began), now_s)
            state = QueueState(
                now_s,
                sum(not r.began for r in waiting),
                sum(r.left for r in waiting),
                now_s - oldest,
                len(answering),
                engine.step_rows,
                engine.most_answers,
                engine.most_answers - len(answering),
            )
            states.append((now_s, ladder.decide(state)))
        if waiting or answering:
            now_s = _step(ladder, engine, now_s, waiting, answering, random)
    return Outcome(requests, states)


def _step(
    ladder: Ladder,
    engine: Engine,
    now_s: float,
    waiting: deque[Arrival],
    answering: list[Arrival],
    random: np.random.Generator,
) -> float:
    state, rows, answers = ladder.state, engine.step_rows, list(answering)
    begun: list[Arrival] = []
    while waiting and rows and len(answering) < engine.most_answers:
        request = waiting[0]
        request.began = True
        taken = min(rows, request.left)
        rows, request.left = rows - taken, request.left - taken
        if not request.left:
            begun.append(waiting.popleft())
            answering.append(begun[-1])
    rows = engine.step_rows - rows
    own = engine.own_s
    prompts, answered = engine.prompt_s * rows, engine.answer_s * len(answers)
    prefill = prompts >= answered
    decode_gain = engine.gain if engine.decode_gain is None else engine.decode_gain
    seconds = (prompts + own * prefill) / (1 + engine.gain * (1 - state.thresholds.prefill))
    seconds += (answered + own * (not prefill)) / (1 + decode_gain * (1 - state.thresholds.decode))
    seconds *= max(0.2, 1 + engine.noise * random.standard_normal())
    now_s += seconds
    ladder.note_step(
        StepTaken(now_s, seconds, rows, len(answers), state.thresholds), engine.step_rows
    )
    for request in begun:
        request.ttft_s = now_s - request.at_s
        ladder.note_latency("prefill", now_s, request.ttft_s, exact=request.exact)
        ladder.arrivals.began(request.prompt, 0)
    for request in answers:
        gap_s = now_s - request.last_s
        request.tpot_s.append(gap_s)
        ladder.note_latency("decode", now_s, gap_s, exact=request.exact)
    for request in [*begun, *answers]:
        request.made, request.last_s = request.made + 1, now_s
        if request.made >= request.answer:
            answering.remove(request)
            ladder.arrivals.ended(request.made)
    return now_s
