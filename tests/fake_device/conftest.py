"""Clusters in one process, on the fake device."""

from collections.abc import Iterator

import pytest

from tests.dispatch.collaborative.conftest import sites
from tests.dispatch.two_phase.conftest import open_lab, unhurried
from tests.fake_device.clocks import Clocks
from tests.fake_device.cuda import fake_device

__all__ = ["open_lab", "sites", "unhurried"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    """A fake CUDA device, and patience for interpreted kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("moesaic.dispatch.collaborative.peers.LEAST_PATIENCE_S", 60.0)
    with fake_device() as clocks:
        yield clocks
