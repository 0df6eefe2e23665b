"""Open WebUI before a real suite: it finds the model, and passes on whole and streamed answers."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.test_openai import GREEDY, MESSAGES
from tests.suites import Suite
from tests.waiting import HANG_S, eventually

COMMAND = os.environ.get("MOESAIC_OPEN_WEBUI", "")

pytestmark = pytest.mark.skipif(
    not COMMAND, reason="MOESAIC_OPEN_WEBUI names no command: requirements-open-webui.txt says how"
)


@pytest.fixture
def page(suite: Suite, tmp_path: Path) -> Iterator[httpx.Client]:
    """A caller of its API, signed in."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "DATA_DIR": str(tmp_path / "data"),
        "WEBUI_SECRET_KEY": "none",
        "WEBUI_AUTH": "False",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{suite.url}/v1",
        "OPENAI_API_KEY": "none",
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    command = [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
            eventually(lambda: _is_up(process, client))
            account = {"email": "", "password": ""}
            token = client.post("/api/v1/auths/signin", json=account).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
    finally:
        process.terminate()
        process.wait(HANG_S)


def _is_up(process: "subprocess.Popen[bytes]", client: httpx.Client) -> bool:
    assert process.poll() is None, "it has ended"
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_chat_comes_through_whole_and_streamed(suite: Suite, page: httpx.Client) -> None:
    [model] = page.get("/api/models").json()["data"]
    body = {**GREEDY, "messages": MESSAGES}
    with suite.client() as direct:
        expected = direct.post("/v1/chat/completions", json=body).json()
    whole = page.post("/api/chat/completions", json={**body, "stream": False}).json()
    streamed = page.post("/api/chat/completions", json={**body, "stream": True}).text

    assert model["id"] == "demo"
    said = expected["choices"][0]["message"]["content"]
    assert whole["choices"][0]["message"]["content"] == said != ""
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
    assert "".join(delta.get("content") or "" for delta in deltas) == said
