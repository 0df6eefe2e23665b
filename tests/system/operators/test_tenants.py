"""Tenants of a real suite: what their keys open, and that none sees what another one asked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.suites import Suite, running
from tests.waiting import eventually

PROMPT = "Once upon a time there was a house on a hill, and nobody knew who had built it. " * 6


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def suite(keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    keys_file.write_text('{"tenants": []}')
    directory = tmp_path_factory.mktemp("tenants")
    with running(directory, "--topology", "local", "--api-keys-file", str(keys_file)) as suite:
        yield suite


def new_key(suite: Suite, keys_file: Path, tenant: str, *flags: str) -> str:
    done = suite.cli(
        *("api-key", "new", "--tenant", tenant, *flags, "--file", str(keys_file), "--json")
    )
    assert done.returncode == 0, done.stderr
    key = str(json.loads(done.stdout)["key"])
    eventually(lambda: get(suite, "/version", key).status_code == 200)
    return key


def get(suite: Suite, path: str, key: str) -> Any:
    with suite.client() as client:
        return client.get(path, headers={"authorization": f"Bearer {key}"})


def ask(suite: Suite, key: str, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **more}
    with suite.client() as client:
        return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def cached_tokens(suite: Suite, key: str, **more: Any) -> int:
    usage = ask(suite, key, **more).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_cannot_probe_what_another_one_asked(suite: Suite, keys_file: Path) -> None:
    one, other = (new_key(suite, keys_file, tenant) for tenant in ("one", "other"))

    for salt in ({}, {"cache_salt": "same"}):
        assert cached_tokens(suite, one, **salt) == 0
        assert cached_tokens(suite, other, **salt) == 0
        assert cached_tokens(suite, one, **salt) > 0
        assert cached_tokens(suite, other, **salt) > 0
    eventually(lambda: {"one", "other"} <= tenants(suite))


def test_a_key_that_is_made_while_it_runs_works_within_its_limits(
    suite: Suite, keys_file: Path
) -> None:
    key = new_key(suite, keys_file, "small", "--tokens-per-minute", "300")

    first = ask(suite, key)
    refused = eventually(lambda: over(ask(suite, key)))

    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "300"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    eventually(lambda: "small" in tenants(suite))
    assert key not in str(suite.log("gateway"))


def over(answer: Any) -> Any:
    """The answer if it says that a limit is reached."""
    return answer if answer.status_code == 429 else None


def tenants(suite: Suite) -> set[str | None]:
    """The tenants of requests that have been logged."""
    return {e.get("tenant") for e in suite.log("gateway") if e["event"] == "request.finished"}
