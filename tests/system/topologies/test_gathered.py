"""Attention workers that fetch experts from each other, or from files, answer as if they had them all."""

import signal
from typing import Any

import httpx
import pytest

from moesaic.v1.gateway_pb2 import GetRouterRequest
from moesaic.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.suites import Suite, running
from tests.system.control import Watch, events
from tests.system.streams import STREAMS, around_fault, check
from tests.waiting import HANG_S, eventually

TOKENS = 24


def answer(suite: Suite, prompt: str) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    answered = httpx.post(
        f"{suite.url}/v1/completions", json=body, timeout=HANG_S
    ).raise_for_status()
    return str(answered.json()["choices"][0]["text"])


def test_workers_with_half_of_the_experts_answer_like_one_that_has_all(
    gathered: Suite, local: Any
) -> None:
    prompts = [f"In the {n}th year of the war," for n in range(4)]

    assert [answer(gathered, p) for p in prompts] == [answer(local, p) for p in prompts]

    for event in ("gather.planned", "peer.linked", "gather.calibrated"):
        eventually(lambda event=event: events(gathered, "attention-0", event))  # type: ignore[misc]
    assert not events(gathered, "attention-0", "pull.failed")


@pytest.mark.slow
def test_what_workers_measured_reaches_the_router(gathered: Suite) -> None:
    def measured(name: str) -> tuple[Any, Any]:
        found = events(gathered, name, "gather.calibrated")[-1]
        slowdown = pytest.approx(found["slowdown"], abs=1e-3)
        return slowdown, pytest.approx(found["saturation_flops"], rel=1e-9)

    def known() -> bool:
        with gathered.blocking_channel(gathered.admin_address("gateway")) as channel:
            state = GatewayServiceStub(channel).GetRouter(GetRouterRequest(), timeout=HANG_S)
        told = {w.worker_id: (w.slowdown, w.saturation_flops) for w in state.workers}
        return told == {name: measured(name) for name in ("attention-0", "attention-1")}

    for name in ("attention-0", "attention-1"):
        eventually(lambda name=name: events(gathered, name, "gather.calibrated"))  # type: ignore[misc]
    eventually(known)


async def test_a_killed_holder_costs_no_request(gathered: Suite) -> None:
    watch = Watch(gathered, "attention-0")
    before, after = await around_fault(
        gathered, lambda: gathered.signal("attention-1", signal.SIGKILL)
    )

    assert check(before, after) == STREAMS
    gathered.until_serving()
    await watch.until("peer.linked")  # the one that came back gives its experts again


@pytest.mark.slow
def test_experts_in_a_file_answer_like_experts_in_memory(local: Any, tmp_path: Any) -> None:
    settings = {"MOESAIC_OFFLOAD_DIR": str(tmp_path / "experts")}
    with running(tmp_path, "--topology", "local", "--offload", settings=settings) as suite:
        assert answer(suite, "The sea") == answer(local, "The sea")
    assert list((tmp_path / "experts").iterdir())


def test_workers_that_compute_every_layer_together_answer_alike(local: Any, tmp_path: Any) -> None:
    with running(tmp_path, "--topology", "all-to-all", "--attention", "2") as suite:
        assert answer(suite, "The sea") == answer(local, "The sea")
