"""Links are dialled until they stand, and dropped when nobody wants them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.common.inprocess import Hub, InProcessNetwork
from moesaic.dispatch import links
from moesaic.dispatch.links import DialledLinks, Endpoint, LinkEvents
from moesaic.errors import PeerLost
from moesaic.transport.frame import FrameLimits
from tests.dispatch.conftest import TIMEOUT_S
from tests.waiting import until

EVENTS = LinkEvents("peer.linked", "peer.unreachable")


class Lab:
    """One asking network, and workers that listen when they are told to."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.client = self.network("client")
        self.networks = [self.client]
        self.told: list[tuple[str, bool]] = []

    def network(self, worker_id: str) -> InProcessNetwork:
        return InProcessNetwork(worker_id, b"secret", FrameLimits.of_hidden_size(32), self.hub)

    def links(self, *, redial: bool = False) -> DialledLinks[Endpoint]:
        def tell(endpoint: Endpoint, link: Any) -> None:
            self.told.append((endpoint.worker_id, link is not None))

        return DialledLinks(self.client, EVENTS, tell, redial=redial)

    async def worker(self, worker_id: str) -> Endpoint:
        network = self.network(worker_id)
        self.networks.append(network)
        address = await network.listen("memory", 0, lambda frame: frame.reply([]))
        return Endpoint(worker_id, 1, address)


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    opened = Lab()
    yield opened
    for network in opened.networks:
        await network.close()


async def test_an_endpoint_is_dialled_until_it_answers(lab: Lab) -> None:
    nobody = Endpoint("a", 1, "memory:9")
    kept = lab.links()

    assert kept.dial(nobody) is None
    await until(lambda: len(lab.told) >= 2)

    assert lab.told[:2] == [("a", False)] * 2
    assert kept.get(nobody) is None
    await kept.close()


async def test_one_link_leads_to_an_endpoint_however_often_it_is_dialled(lab: Lab) -> None:
    endpoint = await lab.worker("a")
    kept = lab.links()

    first = await kept.reach(endpoint, TIMEOUT_S)

    assert kept.dial(endpoint) is first
    assert await kept.reach(endpoint, TIMEOUT_S) is first
    assert lab.told == [("a", True)]
    await kept.close()
    assert not first.alive


async def test_one_that_cannot_be_reached_fails_at_once(lab: Lab) -> None:
    kept = lab.links()

    for _ in range(2):  # the second one does not wait for its turn: the test's own limit is shorter
        with pytest.raises(PeerLost):
            await kept.reach(Endpoint("a", 1, "memory:9"), 3600.0)
    await kept.close()


async def test_links_to_others_end_but_those_that_are_pinned(lab: Lab) -> None:
    ends = [await lab.worker(name) for name in "abc"]
    kept = lab.links()
    made = [await kept.reach(end, TIMEOUT_S) for end in ends]

    kept.keep(ends[:1], pinned=ends[1:2])

    assert [link.alive for link in made] == [True, True, False]
    assert kept.num_alive == 2
    await kept.close()


async def test_who_waits_for_one_that_is_left_out_hears_it(lab: Lab) -> None:
    kept = lab.links()
    endpoint = await lab.worker("a")

    waiting = asyncio.ensure_future(kept.reach(endpoint, 3600.0))
    await asyncio.sleep(0)
    kept.keep(())

    with pytest.raises(PeerLost):
        await waiting
    await kept.close()


@pytest.mark.parametrize("redial", [False, True])
async def test_a_lost_link_is_dialled_anew_when_asked_for_or_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, redial: bool
) -> None:
    monkeypatch.setattr(links, "PAUSES_S", (0.01,))
    endpoint = await lab.worker("a")
    kept = lab.links(redial=redial)
    first = await kept.reach(endpoint, TIMEOUT_S)

    first.discard("lost")
    if not redial:
        # Had it been dialled anew, then before this one, which is dialled with pauses as long.
        nobody = Endpoint("nobody", 1, "memory:9")
        kept.dial(nobody)
        await until(lambda: lab.told.count(("nobody", False)) == 3)
        kept.keep([endpoint])
        assert kept.num_alive == 0
        kept.dial(endpoint)

    await until(lambda: kept.num_alive)
    assert [told for told in lab.told if told[0] == "a"] == [("a", True)] * 2
    await kept.close()
