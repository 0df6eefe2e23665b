"""What operators set is never lost between two who set something at once."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.errors import NotReady
from moesaic.messages.decisions import Pin, PlacementPolicy
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.planning.policy_store import PolicyStore


def with_pin(expert: int) -> Any:
    pin = Pin(layer=0, expert=expert, worker_id="a")
    return lambda before: replace(before, pins=[*before.pins, pin])


async def store(suite: Any, worker_id: str = "s-1") -> PolicyStore:
    leadership = Leadership(suite.bus, "scheduler", worker_id, 1)
    await leadership.contend()
    return PolicyStore(suite.bus, EpochStore(suite.bus, leadership, PlacementView()), "auto")


async def test_changes_at_once_are_all_kept(suite):
    policies = await store(suite)

    await asyncio.gather(*(policies.change(with_pin(expert)) for expert in range(5)))

    assert sorted(pin.expert for pin in policies.current.pins) == [0, 1, 2, 3, 4]
    again = await store(suite)
    await again.refresh()
    assert again.current == policies.current


async def test_a_new_leader_changes_what_there_is_before_it_has_looked(suite):
    before = await store(suite)
    await before.change(with_pin(1))
    await before.change(lambda policy: replace(policy, policy="keep"))

    successor = await store(suite)
    after = await successor.change(with_pin(2))

    assert (after.policy, [pin.expert for pin in after.pins]) == ("keep", [1, 2])


async def test_a_standby_sees_the_policy_and_cannot_change_it(suite):
    leader, standby = await store(suite), await store(suite, "s-2")
    await leader.change(lambda policy: PlacementPolicy(policy="janus"))

    await standby.look()

    assert standby.current.policy == "janus"
    with pytest.raises(NotReady):
        await standby.change(with_pin(1))
    assert standby.current.pins == []
