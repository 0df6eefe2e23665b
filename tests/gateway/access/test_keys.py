import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moesaic.api_keys import digest_of, new_api_key
from moesaic.errors import InvalidInput
from moesaic.services.gateway import access as module
from moesaic.services.gateway.access import Tenants

COMPLETION = {"prompt": "hello", "max_tokens": 4}
OPEN = {"/livez", "/readyz", "/health"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tenant(name: str, *keys: str, scopes: tuple[str, ...] = ("infer",), **more: Any) -> Any:
    return {"name": name, "keys": [digest_of(key) for key in keys], "scopes": scopes, **more}


def write(path: Path, *tenants: Any) -> str:
    path.with_suffix(".new").write_text(json.dumps({"tenants": tenants}))
    os.replace(path.with_suffix(".new"), path)
    return str(path)


async def test_without_a_key_every_route_is_closed_but_those_of_probes(open_house) -> None:
    async with open_house(api_key="k") as house:
        paths = (await house.client.get("/openapi.json", headers=bearer("k"))).json()["paths"]
        assert "/v1/completions" in paths
        for path in [*paths, "/openapi.json", "/docs", "/nowhere", "/classify"]:
            for method in ("GET", "POST", "DELETE"):
                response = await house.client.request(method, path)
                if path not in OPEN:
                    assert response.status_code == 401, path
                    assert response.headers["www-authenticate"] == "Bearer"
                    error = response.json()["error"]
                    code = error.get("code") or error["details"]["error_code"]
                    assert code == "invalid_api_key"
                else:
                    assert response.status_code in (200, 405, 503), path


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (("infer",), {"/v1/models", "/v1/completions"}),
        (("batch",), {"/v1/batches", "/v1/files/x"}),
        (("admin",), {"/metrics"}),
        (("infer", "admin"), {"/v1/models", "/v1/completions", "/metrics"}),
    ],
)
async def test_a_key_opens_what_its_scopes_name(
    open_house, scripts, tmp_path, scopes, allowed
) -> None:
    file = write(tmp_path / "keys.json", tenant("acme", "k1", scopes=scopes))
    async with open_house(scripts.says("yes"), api_keys_file=file) as house:
        for path in ("/v1/models", "/v1/completions", "/v1/batches", "/v1/files/x", "/metrics"):
            method = "POST" if path == "/v1/completions" else "GET"
            response = await house.client.request(
                method, path, json=COMPLETION, headers=bearer("k1")
            )
            refused = response.status_code == 403
            assert refused == (path not in allowed), (path, response.text)
            if refused:
                error = response.json()["error"]
                assert (error["code"], error["type"]) == ("insufficient_scope", "permission_error")
                assert response.headers["x-should-retry"] == "false"
        version = await house.client.get("/version", headers=bearer("k1"))

    assert version.status_code == 200


async def test_one_key_of_all_rights_works_beside_the_file(open_house, scripts, tmp_path) -> None:
    file = write(tmp_path / "keys.json", tenant("acme", "k1", "k2"), tenant("other", "k3"))
    async with open_house(scripts.says("yes"), api_key="root", api_keys_file=file) as house:
        for key in ("k1", "k2", "k3", "root"):
            answer = await house.client.post(
                "/v1/completions", json=COMPLETION, headers=bearer(key)
            )
            assert answer.status_code == 200
        metrics = (await house.client.get("/metrics", headers=bearer("root"))).text
        stranger = await house.client.get("/v1/models", headers=bearer("k4"))
        digest = await house.client.get("/v1/models", headers=bearer(digest_of("k1")))
        finished = [e for e in house.logs if e["event"] == "request.finished"]

    assert {stranger.status_code, digest.status_code} == {401}
    assert [e["tenant"] for e in finished[:4]] == ["acme", "acme", "other", "default"]
    assert finished[-1]["tenant"] is None
    assert 'moesaic_tenant_requests_total{outcome="done",tenant="acme"}' in metrics
    assert 'moesaic_tenant_tokens_total{kind="prompt",tenant="other"}' in metrics
    assert "k4" not in metrics


async def test_an_expired_key_is_no_key(open_house, tmp_path) -> None:
    file = write(
        tmp_path / "keys.json",
        tenant("late", "k1", expires="2020-01-01T00:00:00Z"),
        tenant("early", "k2", expires="2999-01-01T00:00:00+02:00"),
    )
    async with open_house(api_keys_file=file) as house:
        late = await house.client.get("/v1/models", headers=bearer("k1"))
        early = await house.client.get("/v1/models", headers=bearer("k2"))

    assert (late.status_code, early.status_code) == (401, 200)


async def test_a_changed_file_is_taken_over_and_a_bad_one_is_not(
    open_house, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.05)
    path = tmp_path / "keys.json"
    old, new = new_api_key(), new_api_key()
    async with open_house(api_keys_file=write(path, tenant("acme", old))) as house:
        following = asyncio.create_task(house.gateway.tenants.follow())
        try:

            async def status(key: str) -> int:
                return (await house.client.get("/v1/models", headers=bearer(key))).status_code

            def logged(event: str) -> list[Any]:
                return [e for e in house.logs if e["event"] == event]

            assert await status(new) == 401
            write(path, tenant("acme", old, new))
            await house.until(lambda: bool(logged("api_keys.loaded")))
            assert (await status(old), await status(new)) == (200, 200)

            path.write_text('{"tenants": [{"name"')
            await house.until(lambda: len(logged("api_keys.refused")) == 1)
            write(path, tenant("acme", new, scopes=("infer", "everything")))
            await house.until(lambda: len(logged("api_keys.refused")) == 2)
            path.unlink()
            await house.until(lambda: len(logged("api_keys.refused")) == 3)
            assert (await status(old), await status(new)) == (200, 200)
            assert "tenants[0].scopes[1]" in logged("api_keys.refused")[1]["problem"]

            write(path, tenant("acme", new))
            await house.until(lambda: len(logged("api_keys.loaded")) == 2)
            assert (await status(old), await status(new)) == (401, 200)
            logs = str(house.logs)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    assert old not in logs
    assert new not in logs


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "tenants"),
        ("[]", "tenants"),
        ('{"tenants": [{"name": "a"}]}', "tenants[0]"),
        ('{"tenants": [{"keys": []}]}', "tenants[0].keys"),
        ('{"tenants": [{"name": "a b", "keys": [], "scopes": []}]}', "tenants[0].name"),
        ('{"tenants": [{"name": "a", "keys": ["moesaic_sk_x"]}]}', "tenants[0].keys[0]"),
        ('{"tenants": [{"name": "a", "key": 1}]}', "tenants[0]"),
    ],
)
def test_a_bad_file_is_refused_by_field_at_the_start(tmp_path, text: str, field: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)

    with pytest.raises(InvalidInput) as caught:
        Tenants("", str(path))

    assert caught.value.field == "--api-keys-file"
    assert f"{path}: {field}: " in caught.value.fix
    assert "moesaic_sk_x" not in str(caught.value)


@pytest.mark.parametrize(
    ("tenants", "field"),
    [
        ([tenant("a", "k"), tenant("a", "l")], "tenants[1].name"),
        ([tenant("default", "k")], "tenants[0].name"),
        ([tenant("a", "k", "l"), tenant("b", "l")], "tenants[1].keys[0]"),
        ([tenant("a", "k", scopes=())], "tenants[0].scopes"),
        ([tenant("a", "k", scopes=("root",))], "tenants[0].scopes[0]"),
        ([tenant("a", "k", requests_per_minute=0)], "tenants[0].requests_per_minute"),
        ([tenant("a", "k", expires="2030-01-01T00:00:00")], "tenants[0].expires"),
    ],
)
def test_tenants_are_unique_and_well_formed(tmp_path, tenants, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Tenants("", write(tmp_path / "keys.json", *tenants))

    assert f": {field}: " in caught.value.fix


async def test_what_a_tenant_sends_is_salted_with_its_name(open_house, scripts, tmp_path) -> None:
    file = write(tmp_path / "keys.json", tenant("a", "k1"), tenant("ab", "k2"))
    async with open_house(scripts.says("yes"), api_key="root", api_keys_file=file) as house:
        salts = {}
        for key in ("root", "k1", "k2"):
            for salt in (None, "b", "bc", "c"):
                body = COMPLETION if salt is None else {**COMPLETION, "cache_salt": salt}
                await house.client.post("/v1/completions", json=body, headers=bearer(key))
                salts[key, salt] = house.workers[0].submits[-1].cache_salt
        forged = {**COMPLETION, "cache_salt": salts["k1", "b"]}
        refused = await house.client.post("/v1/completions", json=forged, headers=bearer("root"))

    assert [salts["root", salt] for salt in (None, "b")] == ["", "b"]
    assert len(set(salts.values())) == len(salts)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"
