"""Routes that take a JSON body."""

import pytest
from fastapi import APIRouter, Request, Response

from moesaic.errors import NotReady
from moesaic.services.gateway.app import ROUTERS, body_types
from moesaic.services.gateway.fields.tokenizing import TokenizeWire
from moesaic.services.gateway.generate import answers
from moesaic.services.gateway.routes.json_route import JsonRoute

PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/classify",
    "/v1/classify",
    "/v1/decisions",
    "/score",
    "/v1/score",
    "/v1/embeddings",
    "/pooling",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generative_scoring",
    "/tokenize",
    "/detokenize",
    "/v1/batches",
    "/v1/responses",
}


def test_every_route_that_takes_a_json_body_reads_it_by_our_rules() -> None:
    routes = [route for routes in ROUTERS for route in routes.router.routes]

    found = {route.path for route in routes if getattr(route, "body_field", None) is not None}

    assert found == PATHS == {path for path, _ in body_types()}


def test_a_route_that_needs_more_than_its_body_is_refused_at_the_start() -> None:
    router = APIRouter(route_class=JsonRoute)

    async def odd(body: TokenizeWire, request: Request, after: str = "") -> Response:
        return Response(after)

    with pytest.raises(TypeError, match="/odd: expected async def"):
        router.post("/odd")(odd)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"prompt": "a\xff"}', "it is not UTF-8"),
        (b'{"prompt": NaN}', "expected value at line 1 column 12"),
        (b"{'prompt': 1}", "key must be a string at line 1 column 2"),
    ],
)
async def test_a_body_that_cannot_be_read_is_told_why(open_house, scripts, content, reason) -> None:
    async with open_house(scripts.says("yes")) as house:
        headers = {"content-type": "application/json"}
        response = await house.client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"the body is not valid JSON: {reason}"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 400),
        ("application/jsonlines", 400),
        ("application/x/y+json", 400),
        (None, 400),
    ],
)
async def test_a_body_must_come_as_json(open_house, scripts, content_type, status) -> None:
    async with open_house(scripts.says("yes")) as house:
        headers = {} if content_type is None else {"content-type": content_type}
        content = b'{"prompt": "hello", "max_tokens": 1}'
        response = await house.client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "body"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_an_internal_error_and_logged(
    open_house, scripts, monkeypatch, stream
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    async with open_house(scripts.says("yes")) as house:
        monkeypatch.setattr(answers.Answers, "pieces", broken)
        body = {"prompt": "hello", "stream": stream}
        response = await house.client.post("/v1/completions", json=body)
        await house.until(lambda: house.gateway.num_inflight == 0)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    failures = [line for line in house.logs if line["event"].endswith(".failed")]
    assert len(failures) == 1


async def test_an_error_that_is_raised_again_and_again_keeps_no_request(
    open_house, scripts, monkeypatch
) -> None:
    kept = NotReady("experts are lacking", code="placement")

    def admit(*_: object) -> None:
        raise kept

    async with open_house(scripts.says("yes")) as house:
        monkeypatch.setattr(house.gateway, "admit", admit)
        for _ in range(3):
            response = await house.client.post("/v1/completions", json={"prompt": "hello"})
            assert response.status_code == 503

    assert kept.__traceback__ is None


async def test_what_is_no_object_within_a_body_is_told_so(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"messages": ["hello"]}
        response = await house.client.post("/v1/chat/completions", json=body)

    assert response.json()["error"]["message"].startswith("messages[0]: must be a JSON object")
