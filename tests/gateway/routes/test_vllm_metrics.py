"""The gateway's metrics under vLLM's names."""

import asyncio

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.services.gateway.gateway import Gateway
from moesaic.services.gateway.vllm_metrics import VllmNames

LABELS = {"model_name": "dashboards", "engine": "0"}


def scraped(gateway: Gateway) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(VllmNames(gateway.model_name, gateway.workers.routing.router))
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", LABELS | labels)


async def test_a_dashboard_made_for_vllm_finds_what_the_gateway_counted(
    open_house, scripts
) -> None:
    own = {"route": "/v1/completions", "model": "dashboards"}
    async with open_house(scripts.says("hello world"), served_model_name="dashboards") as house:
        before = value(scraped(house.gateway), "request_success_total", finished_reason="stop")
        for route in ("completions", "chat/completions", "completions"):
            what = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
            name = "messages" if "chat" in route else "prompt"
            response = await house.client.post(f"/v1/{route}", json={name: what[name]})
            assert response.status_code == 200, response.text
        registry = scraped(house.gateway)

    assert value(registry, "request_success_total", finished_reason="stop") == before + 3
    assert value(registry, "request_success_total", finished_reason="abort") == 0
    assert value(registry, "e2e_request_latency_seconds_count") == 3
    assert value(registry, "e2e_request_latency_seconds_bucket", le="+Inf") == 3
    assert value(registry, "time_to_first_token_seconds_count") == 3
    assert value(registry, "generation_tokens_total") == 3 * (len(scripts.ids("hello world")) + 1)
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        sums = [value(registry, f"{name}_{part}") for part in ("sum", "count")]
        assert None not in sums
    prompts = value(registry, "prompt_tokens_total")
    assert prompts == value(registry, "prefix_cache_queries_total")
    assert prompts > REGISTRY.get_sample_value("moesaic_prompt_tokens_total", own) > 0
    assert value(registry, "num_requests_running") == 0
    assert value(registry, "num_requests_waiting") == 0


async def test_a_request_counts_as_waiting_until_its_worker_has_begun(open_house, scripts) -> None:
    go_on = asyncio.Event()

    async def begins_late(submit, emit) -> None:
        await go_on.wait()
        await scripts.says("yes")(submit, emit)

    async with open_house(begins_late, served_model_name="dashboards") as house:
        asked = asyncio.create_task(house.client.post("/v1/completions", json={"prompt": "hi"}))
        await house.until(lambda: house.workers[0].submits)
        registry = scraped(house.gateway)
        assert value(registry, "num_requests_waiting") == 1
        assert value(registry, "num_requests_running") == 0
        go_on.set()
        assert (await asked).status_code == 200
        assert value(registry, "num_requests_waiting") == 0


async def test_before_the_first_request_the_page_can_be_read(open_house) -> None:
    async with open_house(served_model_name="nobody-asked") as house:
        text = generate_latest(scraped(house.gateway)).decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "vllm:num_requests_running" in families
    assert {s.value for s in families["vllm:prompt_tokens"].samples} == {0.0}
