"""Tokens that may wait are told together, in order, each once, and never later than they may."""

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import (
    Event,
    FinishEvent,
    GenerationTask,
    ProgressEvent,
    RequestKey,
    TokenEvent,
)
from moesaic.engine.teller import HeldTokens
from tests.engine.rig import NUM_LAYERS, Rig, rig

KEYS = [RequestKey(name) for name in "abc"]
PATIENCE_S = {KEYS[0]: 0.0, KEYS[1]: 0.25, KEYS[2]: 1.0}


@given(data=st.data())
def test_nothing_is_lost_doubled_reordered_or_late(data: st.DataObject) -> None:
    held, now_s = HeldTokens(), 0.0
    counts = dict.fromkeys(KEYS, 0)
    live = set(KEYS)
    came: dict[RequestKey, list[tuple[float, Event]]] = {key: [] for key in KEYS}
    told: dict[RequestKey, list[tuple[float, Event]]] = {key: [] for key in KEYS}
    for _ in range(data.draw(st.integers(0, 30))):
        now_s += data.draw(st.sampled_from([0.01, 0.1, 0.3]))
        events: list[Event] = []
        for key in sorted(live & set(data.draw(st.lists(st.sampled_from(KEYS))))):
            kind = data.draw(st.sampled_from(["token"] * 6 + ["other", "end", "cancelled"]))
            if kind == "cancelled":
                held.forget(key)
                came[key] = came[key][: len(told[key])]
                live.discard(key)
                continue
            if kind == "token":
                event: Event = TokenEvent(key, counts[key], 7, patience_s=PATIENCE_S[key])
                counts[key] += 1
            elif kind == "other":
                event = ProgressEvent(key, 1)
            else:
                event = FinishEvent(key, "stop", 1, counts[key], ())
                live.discard(key)
            events.append(event)
            came[key].append((now_s, event))
        for event in held.pass_on(events, now_s):
            told[event.key].append((now_s, event))
        for key in KEYS:
            waiting = came[key][len(told[key]) :]
            assert all(now_s < at + PATIENCE_S[key] for at, _ in waiting)
            assert key in live or not waiting
    for event in held.release():
        told[event.key].append((now_s, event))
    for key in KEYS:
        assert [event for _, event in told[key]] == [event for _, event in came[key]]
        if told[key]:
            (came_s, _), (told_s, _) = came[key][0], told[key][0]
            assert told_s == came_s  # that an answer has begun is told at once


async def steps_taken(r: Rig, count: int) -> None:
    """Wait for so many steps, of which nothing may be told."""
    end = len(r.dispatcher.asked) + count * NUM_LAYERS
    while len(r.dispatcher.asked) < end:
        await asyncio.sleep(0)


async def test_an_engine_tells_patient_requests_seldom_and_others_at_once(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        task = GenerationTask(max_tokens=20, patience_s=60.0)
        r.submit("patient", [4, 5, 6], task)
        await r.ended("patient")

        assert r.tokens("patient") == tiny_model.greedy([4, 5, 6], 20)
        assert r.calls == [1, 20]  # the first token; the others with the end
        r.calls.clear()
        r.submit("impatient", [4, 5, 6], replace(task, patience_s=0.0))
        await r.ended("impatient")

        assert r.tokens("impatient") == r.tokens("patient")
        assert len(r.calls) >= 20


async def test_a_cancelled_request_is_told_nothing_more(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("patient", [4, 5, 6], GenerationTask(max_tokens=60, patience_s=60.0))
        r.submit("other", [4, 5, 6], GenerationTask(max_tokens=60))
        await r.until(lambda: len(r.tokens("other")) >= 10)
        r.engine.cancel(RequestKey("patient"))
        await r.ended("other")

        assert r.tokens("patient") == r.tokens("other")[:1]


async def test_what_is_held_is_told_when_experts_cannot_be_reached(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("patient", [4, 5, 6], GenerationTask(max_tokens=60, patience_s=60.0))
        await r.until(lambda: r.events)
        await steps_taken(r, 3)
        r.dispatcher.gone = True
        await r.until(lambda: len(r.events) > 1)
        r.dispatcher.gone = False
        await r.ended("patient")

        assert r.tokens("patient") == tiny_model.greedy([4, 5, 6], 60)


async def test_a_step_that_takes_long_does_not_keep_what_was_held_before_it(
    tiny_model: Any,
) -> None:
    async with rig(tiny_model) as r:
        r.submit("patient", [4, 5, 6], GenerationTask(max_tokens=60, patience_s=0.5))
        await steps_taken(r, 4)
        r.dispatcher.turns = 1 << 30  # the next step waits for its experts, as if for ever
        num_computed = len(r.dispatcher.asked) // NUM_LAYERS
        await r.until(lambda: len(r.tokens("patient")) == num_computed)
        r.engine.cancel(RequestKey("patient"))
        r.dispatcher.turns = 0
