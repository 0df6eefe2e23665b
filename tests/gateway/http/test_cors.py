"""Pages of the origins that an operator names may call the gateway, and no others."""

from typing import Any

import pytest
from pydantic import ValidationError

from moesaic.origins import listed
from moesaic.services.gateway.settings import GatewaySettings

PAGE, OTHER = "https://app.example", "https://evil.example"
ORIGINS = f"{PAGE}, http://tool.example:3000"
NEAR = [
    *("http://app.example", "https://app.example:444", "https://app.example.evil.example"),
    *("https://app.example/", "https://APP.example", "https://x.app.example", "null", ""),
]
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


async def test_a_named_page_calls_a_gateway_without_keys_and_reads_its_answers(
    open_house: Any, scripts: Any
) -> None:
    body = {"prompt": "hello", "metadata": {}}
    async with open_house(scripts.says("yes"), allowed_origins=ORIGINS) as house:
        for page in listed(ORIGINS):
            headers = {"origin": page, "sec-fetch-site": "cross-site"}
            asked = await house.client.options("/v1/completions", headers=headers | PREFLIGHT)
            answer = await house.client.post("/v1/completions", json=body, headers=headers)
            wrong = await house.client.post("/v1/completions", json={}, headers=headers)

            assert asked.status_code == 200
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "authorization" in asked.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in asked.headers
            assert (answer.status_code, wrong.status_code) == (200, 400)
            assert {one.headers[ALLOWED] for one in (asked, answer, wrong)} == {page}
            assert "x-moesaic-ignored" in answer.headers["access-control-expose-headers"]
            assert "origin" in answer.headers["vary"].lower()


async def test_no_other_page_is_let_in_by_a_named_one(open_house: Any, scripts: Any) -> None:
    async with open_house(scripts.says("yes"), allowed_origins=ORIGINS) as house:
        for page in (OTHER, *NEAR):
            asked = await house.client.options("/v1/models", headers={"origin": page, **PREFLIGHT})
            answer = await house.client.get("/v1/models", headers={"origin": page})

            assert (asked.status_code, answer.status_code) == (400, 403), page
            assert ALLOWED not in asked.headers, page
            assert ALLOWED not in answer.headers, page
        rebound = await house.client.get(
            "/v1/models", headers={"origin": PAGE, "host": "evil.example"}
        )
        no_origin = await house.client.get(
            "/v1/models", headers={"sec-fetch-site": "cross-site", "referer": f"{PAGE}/"}
        )

    assert [rebound.status_code, no_origin.status_code] == [403, 403]


async def test_without_the_setting_no_answer_mentions_origins(open_house: Any) -> None:
    async with open_house() as house:
        asked = await house.client.options("/v1/models", headers={"origin": PAGE, **PREFLIGHT})
        own = await house.client.get("/v1/models", headers={"origin": house.url})

    assert (asked.status_code, own.status_code) == (403, 200)
    assert not any(name.startswith("access-control") for name in (*asked.headers, *own.headers))


async def test_with_keys_a_preflight_needs_none_and_the_call_does(open_house: Any) -> None:
    async with open_house(api_key="k1", allowed_origins="*") as house:
        asked = await house.client.options("/v1/models", headers={"origin": OTHER, **PREFLIGHT})
        without = await house.client.get("/v1/models", headers={"origin": OTHER})
        key = {"authorization": "Bearer k1", "origin": OTHER}
        answer = await house.client.get("/v1/models", headers=key)

    assert [one.status_code for one in (asked, without, answer)] == [200, 401, 200]
    assert {one.headers[ALLOWED] for one in (asked, without, answer)} == {"*"}


async def test_methods_headers_and_credentials_are_those_of_the_settings(open_house: Any) -> None:
    settings = {
        "allowed_origins": PAGE,
        "allowed_methods": '["GET"]',
        "allowed_headers": "authorization",
        "allow_credentials": True,
    }
    get = {"origin": PAGE, "access-control-request-method": "GET"}
    named = {**get, "access-control-request-headers": "authorization"}
    others = {**get, "access-control-request-headers": "x-other"}
    async with open_house(**settings) as house:
        asks = [
            await house.client.options("/v1/models", headers=headers)
            for headers in (get, named, others, {**PREFLIGHT, "origin": PAGE})
        ]

    assert [asked.status_code for asked in asks] == [200, 200, 400, 400]
    assert asks[0].headers["access-control-allow-credentials"] == "true"
    assert asks[0].headers["access-control-allow-methods"] == "GET"


@pytest.mark.parametrize("origin", [*NEAR[3:5], "app.example", "null", "https://*.example", "a b"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        GatewaySettings(model="m", allowed_origins=f"{PAGE},{origin}")


@pytest.mark.parametrize("names", ["GET POST", "[]", ",", '["GET", 1]'])
def test_names_that_are_none_are_refused_at_start(names: str) -> None:
    with pytest.raises(ValidationError, match="allowed_methods"):
        GatewaySettings(model="m", allowed_methods=names)


def test_a_list_is_read_in_both_forms() -> None:
    assert listed(f'["{PAGE}", "*"]') == listed(f"{PAGE} ,*,") == (PAGE, "*")
    assert listed("") == listed("[]") == ()


async def test_load_counts_the_inference_requests_in_flight(open_house: Any, scripts: Any) -> None:
    body = {"prompt": "hello", "stream": True}
    async with open_house(scripts.begins("yes"), api_key="k1") as house:
        key = {"authorization": "Bearer k1"}

        async def load() -> Any:
            return (await house.client.get("/load", headers=key)).json()

        assert await load() == {"server_load": 0}
        async with house.client.stream("POST", "/v1/completions", json=body, headers=key):
            assert await load() == {"server_load": 1}
        await house.gateway.idle.wait()
        assert await load() == {"server_load": 0}
        assert (await house.client.get("/load")).status_code == 401
