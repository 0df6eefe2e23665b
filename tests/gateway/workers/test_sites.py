"""Requests of a site go to its edge agent, as long as that takes them."""

from typing import Any

import pytest
from msgspec.structs import replace

BODY = {"prompt": "a b c", "max_tokens": 1}


async def _with_sites(house: Any) -> None:
    for n, record in enumerate(list(house.fleet.workers.values())):
        house.fleet.put(replace(record, role="edge-agent", site=f"site-{n}"))
    sites = {"site-0", "site-1", "site-2"}
    await house.until(lambda: {w.record.site for w in house.gateway.workers.accepting} == sites)


@pytest.mark.parametrize("way", ["body", "header"])
async def test_a_request_goes_to_the_agent_of_its_site(
    open_house: Any, scripts: Any, way: str
) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, says) as house:
        await _with_sites(house)
        body = {**BODY, "moesaic": {"site": "site-1"}} if way == "body" else BODY
        headers = {"X-Moesaic-Site": "site-1"} if way == "header" else {}
        for _ in range(4):
            answer = await house.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200

        assert [len(worker.submits) for worker in house.workers] == [0, 4, 0]


async def test_without_its_agent_another_site_answers(open_house: Any, scripts: Any) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, says) as house:
        await _with_sites(house)
        await house.workers[1].kill()
        await house.until(lambda: len(house.gateway.workers.accepting) == 2)

        answer = await house.client.post(
            "/v1/completions", json=BODY, headers={"X-Moesaic-Site": "site-1"}
        )

        assert answer.status_code == 200


async def test_a_gateway_at_a_site_sends_requests_to_its_agent(
    open_house: Any, scripts: Any
) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, says, site="site-2") as house:
        await _with_sites(house)
        for _ in range(3):
            await house.client.post("/v1/completions", json=BODY)

        assert [len(worker.submits) for worker in house.workers] == [0, 0, 3]
