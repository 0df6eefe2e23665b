"""Gateways that look every moment at what may have changed on disk, not every second."""

import pytest

from moesaic.services.gateway.batches import carry, runner


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (carry, runner):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.1)
