"""``moesaic top`` at a gateway that stops while somebody looks."""

from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.http_servers import JsonHandler, JsonServer, serving

STATE: dict[str, Any] = {
    **{"model": "demo", "ready": True, "epoch": 3, "at": 0.0},
    "traffic": {"tokens_per_s": 1.0, "requests_per_s": 1.0, "inflight": 0, "queued": 0},
    **{"services": [], "requests": [], "decisions": []},
}


class Stopping(JsonHandler):
    """Tells one state, and then stops as gateways do."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.event(STATE)
        self.event("[DONE]")


def test_a_gateway_that_stops_is_told(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the screen is for terminals
    with serving(JsonServer(Stopping)) as server:
        done = ask("top", "--url", server.url)

    assert "Moesaic demo" in done.stdout
    assert done.returncode == 3
    assert f"the gateway at {server.url} has stopped" in done.stderr
