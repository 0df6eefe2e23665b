"""An expert worker says what it waits for while it warms its kernels, on a GPU alone."""

from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.errors import InvalidInput
from moesaic.services.expert.main import warm_kernels
from moesaic.services.expert.settings import ExpertSettings


class Host:
    def __init__(self, status: ServiceStatus, error: Exception | None = None) -> None:
        self._status, self._error = status, error
        self.asked: list[list[str]] = []
        self.warm_up = self

    async def run(self) -> None:
        self.asked.append(list(self._status.waiting_for))
        if self._error:
            raise self._error


class Thread:
    async def run(self, work: Awaitable[None]) -> None:
        await work


async def warmed(device: str, error: Exception | None = None) -> tuple[Host, ServiceStatus]:
    settings = ExpertSettings(model="m", device=device)
    status = ServiceStatus("expert", "e0", 1)
    status.waiting_for.append("something else")
    host, process = Host(status, error), SimpleNamespace(settings=settings, status=status)
    thread: Any = Thread()
    try:
        await warm_kernels(process, host, thread)  # type: ignore[arg-type]  # what it needs of them
    finally:
        assert status.waiting_for == ["something else"]
    return host, status


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
async def test_people_are_told_of_the_warm_up(device: str) -> None:
    host, _ = await warmed(device)

    assert host.asked == [["something else", "warming kernels"]]


async def test_a_cpu_has_nothing_to_compile() -> None:
    host, _ = await warmed("cpu")

    assert host.asked == []


async def test_a_warm_up_that_fails_ends_the_start() -> None:
    with pytest.raises(InvalidInput, match="--slots-per-layer"):
        await warmed("cuda", InvalidInput("--slots-per-layer", "lower it"))
