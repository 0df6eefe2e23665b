"""The store of ranks on several machines: values, the secret, and ranks that are gone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from moesaic.addresses import host_port
from moesaic.cluster.security.credentials import Credentials, using
from moesaic.errors import UnusableSettings
from moesaic.services.attention.rank_store import RemoteStore, serving_store

SECRET = Credentials(b"the cluster secret")
SOON, LATER = timedelta(milliseconds=1), timedelta(seconds=60)


class Lost:
    """Notes who was lost."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.happened = threading.Event()

    def __call__(self, error: Exception) -> None:
        self.errors.append(str(error))
        self.happened.set()


@asynccontextmanager
async def served(
    lost: Callable[[Exception], Any] = lambda error: None, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    with using(SECRET):
        async with serving_store("attention-0", host, 0, lost) as port:
            yield host_port(host, int(port))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_it_is_a_store_as_torch_has_them(host: str) -> None:
    async with served(host=host) as address:
        one, other = RemoteStore(address, SECRET), RemoteStore(address, SECRET)

        def use() -> None:
            one.set("a", b"\x00\xff")
            assert other.get("a") == b"\x00\xff"
            other.wait(["a"], LATER)
            assert other.check(["a"])
            assert not other.check(["a", "b"])
            assert [one.add("n", 2), other.add("n", -5), one.add("n", 4)] == [2, -3, 1]
            assert one.compare_set("c", b"", b"first") == b"first"
            assert other.compare_set("c", b"", b"second") == b"first"
            assert other.compare_set("c", b"first", b"second") == b"second"
            assert (one.delete_key("c"), one.delete_key("c")) == (True, False)
            with pytest.raises(RuntimeError, match="b not set within"):
                one.wait(["b"], SOON)
            with pytest.raises(RuntimeError, match="a is no number"):
                one.add("a", 1)

        await asyncio.to_thread(use)


async def test_who_waits_for_a_value_gets_it_when_it_is_set() -> None:
    async with served() as address:
        one, other = RemoteStore(address, SECRET), RemoteStore(address, SECRET)
        waiting = asyncio.create_task(asyncio.to_thread(one.get, "late"))
        await asyncio.to_thread(other.set, "other", b"1")

        await asyncio.to_thread(other.set, "late", b"2")

        assert await waiting == b"2"


@pytest.mark.parametrize("secret", [b"", b"another secret"])
async def test_a_stranger_can_neither_read_nor_write_nor_stay(secret: bytes) -> None:
    lost = Lost()
    async with served(lost) as address:
        stranger, peer = RemoteStore(address, Credentials(secret)), RemoteStore(address, SECRET)

        def attack() -> None:
            peer.set("key", b"value")
            for act in (
                lambda: stranger.get("key"),
                lambda: stranger.set("key", b"other"),
                lambda: stranger.add("key", 1),
                lambda: stranger.delete_key("key"),
                lambda: stranger.check(["key"]),
            ):
                with pytest.raises(RuntimeError, match="UNAUTHENTICATED"):
                    act()
            assert peer.get("key") == b"value"
            refused = Lost()
            stranger.stay(1, refused)
            assert refused.happened.wait(60)

        await asyncio.to_thread(attack)
    assert lost.errors == []  # a stranger that leaves is no rank


async def test_both_ends_learn_that_the_other_is_gone() -> None:
    at_first, at_second = Lost(), Lost()
    async with served(at_first) as address:
        rank = RemoteStore(address, SECRET)
        rank.stay(3, at_second)
        await asyncio.to_thread(rank.check, ["anything"])  # the connection is there
        channel = rank._channel

        with suppress(ValueError):
            await asyncio.to_thread(channel.close)

        assert await asyncio.to_thread(at_first.happened.wait, 60)
    assert at_first.errors == ["rank 3 is gone"]


async def test_ranks_that_are_let_go_are_not_lost() -> None:
    at_first, at_second = Lost(), Lost()
    async with served(at_first) as address:
        rank = RemoteStore(address, SECRET)
        rank.stay(1, at_second)
        await asyncio.to_thread(rank.check, ["anything"])

    await asyncio.to_thread(rank.leave)
    assert at_first.errors == at_second.errors == []


async def test_an_address_of_another_machine_is_refused() -> None:
    with using(SECRET), pytest.raises(UnusableSettings, match="tensor_parallel_address"):
        async with serving_store("attention-0", "198.51.100.1", 0, lambda error: None):
            pass
