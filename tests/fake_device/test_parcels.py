"""Rows and sums between the memories of devices, over real UCX: who sends has waited for what it sends."""

from collections import Counter
from typing import Any

import pytest
import torch

from moesaic.dispatch import route
from moesaic.dispatch.routed import asking
from moesaic.errors import ExpertUnavailable
from moesaic.experts import answering
from tests.dispatch.conftest import open_cluster
from tests.dispatch.routed.test_parcels import HALVES, ParcelCluster
from tests.fake_device.clocks import DeviceFault
from tests.fake_device.parcels import let_ucx_take_the_device
from tests.fake_device.test_dispatch import GPU, check, sums

pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.suite]


class OnDevice(ParcelCluster):
    transports = "auto"
    device = GPU


@pytest.fixture(autouse=True)
def _ucx_takes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    let_ucx_take_the_device(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_sums_are_those_of_experts_here(
    tiny_model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_cluster(tiny_model, 2, of=OnDevice, where=GPU, dtype=dtype) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.all_linked(1)

        await check(c.routed, c.local, dtype)
        monkeypatch.setattr(route, "BY_HOST_BYTES", 0)
        await check(c.routed, c.local, dtype)

    assert Counter(c.seen) == {(0, 0): 2, (1, 1): 2}


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (asking, "mark", DeviceFault),
        # The error of whoever asks.
        (answering, "settle", ExpertUnavailable),
    ],
    ids=["attention", "experts"],
)
async def test_a_side_that_does_not_wait_for_its_device_is_found_out(
    tiny_model: Any,
    module: Any,
    name: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the tests above would show nothing of it."""
    monkeypatch.setattr(route, "BY_HOST_BYTES", 0)
    monkeypatch.setattr(module, name, lambda device: lambda: None)
    async with open_cluster(tiny_model, 2, of=OnDevice, where=GPU) as c:
        c.put_in_force(c.placement(1, *HALVES))
        await c.all_linked(1)

        with pytest.raises(error):
            await sums(c.routed, torch.randn(5, 32, device=GPU))
