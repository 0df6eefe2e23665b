"""The prefix router of a real suite: it knows what each worker has cached, and what is under way."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from moesaic.v1.gateway_pb2 import GetRouterRequest, GetRouterResponse, SetPolicyRequest
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.suites import Suite
from tests.waiting import HANG_S, eventually

PROMPTS = [
    f"Chapter {n}. " + "It was a dark night, and the old house stood alone. " * 12 for n in range(6)
]


@pytest.fixture
def suite(pair: Suite) -> Suite:
    return pair


@pytest.fixture
def router(suite: Suite) -> Iterator[GatewayServiceStub]:
    with suite.blocking_channel(suite.admin_address("gateway")) as channel:
        yield GatewayServiceStub(channel)


def look(router: GatewayServiceStub) -> GetRouterResponse:
    return router.GetRouter(GetRouterRequest(), timeout=HANG_S)


def ask(suite: Suite, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "moesaic": {"provenance": True}}
    answer = httpx.post(f"{suite.url}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_all(suite: Suite) -> list[Any]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: ask(suite, prompt), PROMPTS))


def test_prompts_go_back_to_the_worker_that_has_them(
    suite: Suite, router: GatewayServiceStub
) -> None:
    router.SetPolicy(SetPolicyRequest(policy="round-robin"), timeout=HANG_S)
    first = ask_all(suite)
    router.SetPolicy(SetPolicyRequest(policy="prefix-flops"), timeout=HANG_S)
    assert len({tuple(answer["moesaic"]["workers"]) for answer in first}) == 2
    eventually(lambda: min(worker.committed_blocks for worker in look(router).workers) > 10)
    again = [ask(suite, prompt) for prompt in PROMPTS]

    for before, after in zip(first, again, strict=True):
        assert after["moesaic"]["workers"] == before["moesaic"]["workers"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert after["choices"] == before["choices"]

    def idle() -> bool:
        facts = [(w.caches, w.remaining_flops, w.num_requests) for w in look(router).workers]
        return facts == [(True, 0, 0)] * 2

    eventually(idle)
    state = look(router)
    assert all(worker.committed_blocks > 10 for worker in state.workers)
    assert state.index_blocks > 20


def test_another_policy_holds_at_once(suite: Suite, router: GatewayServiceStub) -> None:
    router.SetPolicy(SetPolicyRequest(policy="round-robin"), timeout=HANG_S)
    with pytest.raises(grpc.RpcError) as refused:
        router.SetPolicy(SetPolicyRequest(policy="best"), timeout=HANG_S)
    workers = [tuple(ask(suite, PROMPTS[0])["moesaic"]["workers"]) for _ in range(2)]
    router.SetPolicy(SetPolicyRequest(policy="prefix-flops"), timeout=HANG_S)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(set(workers)) == 2
    assert look(router).policy == "prefix-flops"


def test_a_killed_worker_s_blocks_are_forgotten_and_known_again_when_it_has_some(
    suite: Suite, router: GatewayServiceStub
) -> None:
    ask_all(suite)
    with suite.unsupervised():
        suite.signal("attention-0", signal.SIGKILL)
        eventually(lambda: len(look(router).workers) == 1)
        answers = ask_all(suite)
    eventually(lambda: sum(worker.accepting for worker in look(router).workers) == 2)

    assert all(answer["moesaic"]["workers"] == ["attention-1"] for answer in answers)
    assert 0 in [worker.committed_blocks for worker in look(router).workers]
    eventually(lambda: not any(worker.remaining_flops for worker in look(router).workers))
