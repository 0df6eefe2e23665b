"""A gateway's files and batches as its tests use them: through OpenAI's client."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import openai

from moesaic.api_keys import digest_of
from tests.waiting import eventually

URL = "/v1/completions"
T = TypeVar("T")


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a", **body}}


def encoded(*lines: Any) -> bytes:
    return b"".join(v if isinstance(v, bytes) else json.dumps(v).encode() + b"\n" for v in lines)


def connect(house, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0)


async def talk(house, work: Callable[[openai.OpenAI], T], key: str = "none") -> T:
    def connected() -> T:
        with connect(house, key) as client:
            return work(client)

    return await asyncio.to_thread(connected)


def submit(client: openai.OpenAI, content: bytes, endpoint: str = URL, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    def found() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(found)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def keys_of(directory: Path, *names: str, **terms: Any) -> str:
    """A file of tenants, each with the key ``key-NAME``."""
    tenants = [
        {"name": name, "keys": [digest_of(f"key-{name}")], "scopes": ["infer", "batch"], **terms}
        for name in names
    ]
    (directory / "keys.json").write_text(json.dumps({"tenants": tenants}))
    return str(directory / "keys.json")


def kept(root: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in root.glob(pattern))


# Files
