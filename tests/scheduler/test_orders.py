"""Orders of operators that go on without them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.services.scheduler.admin import Parts, SchedulerAdmin
from moesaic.v1 import scheduler_pb2 as pb


async def test_an_order_to_scale_is_finished_when_its_caller_has_gone() -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def order(shape: FleetShape, reason: str, *, keep_mode: bool) -> str:
        begun.set()
        await may_end.wait()
        ended.set()
        return "1"

    admin = SchedulerAdmin()
    parts = SimpleNamespace(
        loop=SimpleNamespace(require_lead=lambda: None),
        scaling=SimpleNamespace(order=order),
        scaling_store=SimpleNamespace(policy=ScalingPolicy()),
    )
    admin.open(cast("Parts", parts))
    request = pb.ScaleRequest(shape=pb.FleetShape(attention=2, experts=2))
    call = asyncio.create_task(admin.Scale(request, cast("Any", None)))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    may_end.set()
    await ended.wait()
