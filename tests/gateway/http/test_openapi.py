"""The API does what its own description says: requests are made from it, and answers compared with it."""

import asyncio
import contextlib
import json
import os
import re
import struct
from typing import Any
from urllib.parse import urljoin

import hypothesis
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.generation import GenerationMode

from moesaic.api_keys import digest_of
from moesaic.services.gateway.routes.docs import RAPIDOC
from moesaic.v1 import attention_pb2 as pb

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
NUM_EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", 6 if "CI" in os.environ else 2))
HEADERS = {"authorization": "Bearer k"}


@pytest.fixture
def obliging(scripts) -> Any:
    """A worker that gives whatever is asked for."""

    def entry() -> pb.TokenLogprob:
        return pb.TokenLogprob(logprob=-0.5, rank=2, top_token_ids=[9], top_logprobs=[-0.25])

    async def script(submit: pb.Submit, emit) -> None:
        if submit.WhichOneof("work") == "scoring":
            emit(scores=pb.Scores(logprobs=[-1.0] * len(submit.scoring.candidates)))
            emit(finished=scripts.finished(submit, 0, stop=False))
            return
        if submit.WhichOneof("work") == "embedding":
            emit(pooled=pb.Pooled(values=struct.pack("<16f", *range(16))))
            emit(finished=scripts.finished(submit, 0, stop=False))
            return
        if submit.generation.HasField("prompt_logprobs"):
            told = [entry() for _ in submit.token_ids[1:]]
            emit(prompt_logprobs=pb.PromptLogprobs(first_position=1, logprobs=told))
        said = scripts.ids("yes no")[: submit.generation.max_tokens]
        told = [entry() for _ in said] if submit.generation.HasField("top_logprobs") else []
        emit(tokens=pb.Tokens(token_index=0, token_ids=said, logprobs=told))
        emit(finished=scripts.finished(submit, len(said)))

    return script


def keys_file(tmp_path: Any) -> str:
    scopes = ["infer", "batch", "admin"]
    entry = {"name": "acme", "keys": [digest_of("k")], "scopes": scopes, "max_concurrent": 9}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": [entry]}))
    return str(path)


async def test_answers_are_as_described(open_house, obliging, tmp_path, subtests) -> None:
    async with open_house(obliging, api_keys_file=keys_file(tmp_path)) as house:
        described = (await house.client.get("/openapi.json", headers=HEADERS)).json()
        schema = schemathesis.openapi.from_dict(described)
        for result in schema.get_all_operations():
            operation = result.ok()
            with subtests.test(operation=operation.label):
                await asyncio.to_thread(check_operation, operation, house.url)


def check_operation(operation: Any, url: str) -> None:
    for mode in GenerationMode:
        cases = operation.as_strategy(generation_mode=mode)

        @hypothesis.given(case=cases)
        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def check(case: Any) -> None:
            response = case.call(base_url=url, headers=HEADERS)
            hurried = response.status_code == 504  # it asked for an answer within milliseconds
            case.validate_response(response, checks=CHECKS[hurried:])

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing of it can be wrong
            check()


async def test_keys_and_limits_are_described_where_they_are_needed(open_house, tmp_path) -> None:
    async with open_house() as house:
        free = (await house.client.get("/openapi.json")).json()
    async with open_house(api_keys_file=keys_file(tmp_path)) as house:
        closed = (await house.client.get("/openapi.json", headers=HEADERS)).json()

    assert "securitySchemes" not in free["components"]
    assert closed["components"]["securitySchemes"] == {
        "api_key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    chat, metrics, livez = (
        closed["paths"][path][method]
        for path, method in (
            ("/v1/chat/completions", "post"),
            ("/metrics", "get"),
            ("/livez", "get"),
        )
    )
    assert chat["security"] == [{"api_key": ["infer"]}, {"x_api_key": ["infer"]}]
    assert metrics["security"] == [{"api_key": ["admin"]}, {"x_api_key": ["admin"]}]
    assert "security" not in livez
    assert {"401", "403", "429"} <= chat["responses"].keys()
    assert (
        not {"401", "403", "429"}
        & free["paths"]["/v1/chat/completions"]["post"]["responses"].keys()
    )
    assert "422" not in json.dumps(closed)
    assert '"$defs"' not in json.dumps(closed)


async def test_the_page_for_people_needs_nothing_from_elsewhere(open_house) -> None:
    async with open_house() as house:
        page = await house.client.get("/docs")
        addresses = re.findall(r'(?:src|href|url)="([^"]*)"', page.text)
        parts = {one: await house.client.get(urljoin("/docs", one)) for one in addresses}

    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert parts.keys() == {"docs/rapidoc.js", "openapi.json"}
    assert {part.status_code for part in parts.values()} == {200}
    script = parts["docs/rapidoc.js"]
    assert script.headers["content-type"].startswith("text/javascript")
    version = re.match(r"RapiDoc ([\d.]+)", (RAPIDOC.parent / "LICENSE.txt").read_text())
    assert version is not None
    assert script.text.startswith(f"/*! RapiDoc {version[1]} ")


async def test_what_a_path_allows_is_told_of_all_its_routes(open_house) -> None:
    async with open_house() as house:
        refused = await house.client.patch("/v1/files/f")

    assert refused.status_code == 405
    assert refused.headers["allow"] == "DELETE, GET, HEAD"
