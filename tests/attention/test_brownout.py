"""The policy of brownout reaches a worker's engine, and its decisions reach the scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from moesaic.cluster.background import background
from moesaic.cluster.brownout_view import DECISIONS, POLICY, STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.engine.sequences.requests import FinishEvent, GenerationTask
from moesaic.engine.thread import EngineThread
from moesaic.errors import CheckpointError, PeerLost
from moesaic.messages.brownout import BrownoutDecision, BrownoutHint, BrownoutPolicy
from moesaic.messages.substitution import Substitution
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.brownout import follow_policy, tell_decisions
from moesaic.services.attention.substitution import SubstitutionFollower
from moesaic.v1 import attention_pb2 as pb
from tests import waiting
from tests.attention.test_admin import serving
from tests.engine.rig import rig
from tests.redis_servers import RedisServers

MANUAL = BrownoutPolicy(mode="manual", prefill_threshold=0.5)
_decisions: "msgspec.msgpack.Decoder[BrownoutDecision]" = msgspec.msgpack.Decoder(BrownoutDecision)


@asynccontextmanager
async def worker(model: Any, url: str) -> AsyncIterator[tuple[AttentionAdmin, Bus]]:
    async with Bus.connect(url, "test") as bus, serving(model, observed=True) as service:
        running = service.requests.engine
        assert running is not None
        telling = tell_decisions(bus, running, "attention-0", 7)
        following = follow_policy(bus, running, SubstitutionFollower(None, running.thread))
        async with background(following, "policy"), background(telling, "tell"):
            yield service, bus


async def set_policy(bus: Bus, policy: BrownoutPolicy) -> None:
    while True:
        with suppress(PeerLost):  # it may have just been started again
            await bus.put(POLICY, policy)
            await bus.append(STREAM, BrownoutHint(mode=policy.mode))
            return


async def until(service: AttentionAdmin, holds: Callable[[pb.BrownoutLoad], bool]) -> None:
    async def met() -> bool:
        load = await service.GetLoad(pb.GetLoadRequest(), None)  # type: ignore[arg-type]  # unused
        return holds(load.brownout)

    await waiting.until(met)


async def test_a_policy_is_followed_and_its_decisions_are_told(
    tiny_model: Any, redis_servers: RedisServers
) -> None:
    with redis_servers.lent() as redis:
        async with worker(tiny_model, redis.url) as (service, bus):
            await set_policy(bus, MANUAL)

            await until(service, lambda load: load.prefill_threshold == 0.5)
            told = await waiting.until(lambda: bus.latest(DECISIONS, _decisions, 9))

    assert told[0].decision_id == "attention-0/7/1"
    assert (told[0].prefill_before, told[0].prefill, told[0].mode) == (1.0, 0.5, "manual")
    assert told[0].at > 1e9


async def test_without_redis_the_last_policy_holds(
    tiny_model: Any, redis_servers: RedisServers
) -> None:
    with redis_servers.lent() as redis:
        async with worker(tiny_model, redis.url) as (service, bus):
            await set_policy(bus, MANUAL)
            await until(service, lambda load: load.mode == "manual")
            redis.kill(lose_data=True)
            redis.start()
            # Redis has another one now, which makes no sense.
            with capture_logs() as logs:
                await set_policy(bus, BrownoutPolicy(way=3))
                await waiting.until(lambda: "document.refused" in {log["event"] for log in logs})
            running = service.requests.engine
            assert running is not None
            assert running.engine.brownout.policy == MANUAL
            await set_policy(bus, BrownoutPolicy())
            await until(service, lambda load: (load.mode, load.prefill_threshold) == ("off", 1.0))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("united", "is damaged"),
        MemoryError("full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
async def test_rows_make_do_with_fewer_experts_if_united_ones_cannot_be_loaded(
    tiny_model: Any, error: Exception
) -> None:
    async with rig(tiny_model) as r:
        degrading = r.dispatcher
        load = degrading.substitutions.load

        def fails(substitution: Substitution) -> LoadedSubstitution:
            if substitution.instead == "united":
                raise error
            return load(substitution)

        degrading.substitutions.load = fails
        substitutions = SubstitutionFollower(degrading, EngineThread(asyncio.get_running_loop()))
        await substitutions.follow(BrownoutPolicy(mode="manual", way=2))
        await substitutions.follow(BrownoutPolicy(mode="manual", way=2))  # at every look
        r.engine.brownout.set_policy(MANUAL)
        r.submit("degraded", range(2, 40), GenerationTask(max_tokens=4))
        await r.ended("degraded")

        told = r.last("degraded")
    assert isinstance(told, FinishEvent)
    assert 0 < told.degradation.share < 1
