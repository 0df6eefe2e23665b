"""A suite of real services serves a model of the hub, with a shorter context."""

from pathlib import Path

import httpx
import pytest

from benchmarks.common.suite import running_suite
from tests.hub_server import HubRepository, hub_server
from tests.suites import DEMO
from tests.waiting import HANG_S


@pytest.mark.slow
def test_a_model_of_the_hub_is_served_under_its_name(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    with hub_server(acme__demo=HubRepository(files)) as hub:
        cache = hub.variables(tmp_path)
        flags = ("--model", "acme/demo", "--topology", "local", "--max-model-len", "128")
        with running_suite(*flags, **cache) as suite:
            url = f"http://127.0.0.1:{suite.port}/v1"
            [model] = httpx.get(f"{url}/models", timeout=HANG_S).json()["data"]
            body = {"model": "acme/demo", "prompt": "Once upon a time", "max_tokens": 4}
            answered = httpx.post(f"{url}/completions", json=body, timeout=HANG_S)
            too_long = httpx.post(
                f"{url}/completions", json={**body, "max_tokens": 200}, timeout=HANG_S
            )

    assert (model["id"], model["max_model_len"]) == ("acme/demo", 128)
    assert answered.json()["usage"]["completion_tokens"] == 4
    assert too_long.status_code == 400
    assert sum(asked.sent for asked in hub.bodies()) == sum(
        len(content) for name, content in files.items() if name == "model.safetensors"
    )
