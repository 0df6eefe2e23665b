import asyncio

import pytest

from moesaic.cluster.leadership import LEASE_S, Leadership, leadership
from moesaic.errors import PeerLost


async def test_one_leads_and_another_takes_over_when_it_resigns(bus):
    async with leadership(bus, "scheduler", "a", 1) as first:
        second = Leadership(bus, "scheduler", "b", 1)
        await second.contend()
        assert (first.held, second.held, second.leader) == (True, False, "a")

    await second.contend()
    assert (first.held, second.held, second.leader) == (False, True, "b")


async def test_a_leader_that_slept_through_its_lease_cannot_write(bus):
    paused, successor = (Leadership(bus, "scheduler", name, 1) for name in ("a", "b"))
    await paused.contend()
    await bus.delete("leader:scheduler")  # as its expiry does
    await successor.contend()

    assert paused.held  # it cannot know
    assert not await bus.compare_and_set({**paused.fence, "x": None}, {"x": b"paused"})
    assert await bus.compare_and_set({**successor.fence, "x": None}, {"x": b"successor"})
    await paused.contend()
    assert not paused.held


async def test_a_restarted_scheduler_does_not_wait_for_its_own_lease(bus):
    killed, restarted = (Leadership(bus, "scheduler", "a", number) for number in (1, 2))
    await killed.contend()

    await restarted.contend()
    await killed.contend()

    assert (killed.held, restarted.held) == (False, True)


async def test_a_lead_that_cannot_be_renewed_ends_by_the_leaders_own_clock(bus, redis_server):
    now_s = 0.0
    leader = Leadership(bus, "scheduler", "a", 1, lambda: now_s)
    await leader.contend()
    redis_server.kill()

    now_s = LEASE_S - 0.1
    with pytest.raises(PeerLost):
        await leader.contend()
    assert leader.held
    now_s = LEASE_S + 0.1

    assert not leader.held
    redis_server.start()


async def test_a_leader_that_renews_twice_at_once_still_leads(bus):
    leader = Leadership(bus, "scheduler", "s-1", 1)

    for _ in range(10):
        await asyncio.gather(*(leader.contend() for _ in range(4)))

        assert leader.held


async def test_a_lead_that_ran_out_while_its_holder_slept_is_said(bus, capsys):
    now_s = 0.0
    leader, other = (
        Leadership(bus, "scheduler", name, 1, lambda: now_s) for name in ("s-1", "s-2")
    )
    await leader.contend()
    await bus.delete("leader:scheduler")  # as its expiry does
    await other.contend()
    now_s = LEASE_S + 0.1

    await leader.contend()

    said = [line.split() for line in capsys.readouterr().out.splitlines() if "changed" in line]
    assert [("leads=True" in line, "leader=s-1" in line) for line in said] == [
        (True, True),
        (True, False),
        (False, False),
    ]


@pytest.mark.parametrize(
    "holder",
    [
        b"",
        b"x",
        b"mallory/1",
        b"s-1/" + b"9" * 5000,
        "s-1/²".encode(),
        b"\xff/1",
        b"/1",
        b"9" * 9000,
    ],
)
async def test_a_lease_that_no_scheduler_holds_is_taken(bus, holder: bytes) -> None:
    """It has another form, or no end."""
    await bus.compare_and_set({"leader:scheduler": None}, {"leader:scheduler": holder})

    async with leadership(bus, "scheduler", "s-1", 1) as claim:
        assert claim.held


async def test_a_lease_that_another_scheduler_holds_is_not_taken(bus) -> None:
    await bus.compare_and_set(
        {"leader:scheduler": None}, {"leader:scheduler": b"s-2/1"}, ttl_s=LEASE_S
    )

    async with leadership(bus, "scheduler", "s-1", 1) as claim:
        assert not claim.held
        assert claim.leader == "s-2"
