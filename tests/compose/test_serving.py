"""The images, built from nothing, serve; workers come, go, hang and are cut off under load."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.compose.containers import Containers, docker, secret
from tests.compose.load import PROMPTS, TOKENS, Answers, Load, classify
from tests.waiting import eventually

# Others notice by silence alone that it is away, after seven seconds at most.
LOST_S = 10.0
TYPED = {"expert_unavailable", "deadline_exceeded", "worker_lost", "not_ready"}
Fault = Callable[[Containers, str], None]


def test_answers_through_the_published_port_equal_those_of_the_same_suite_as_processes(
    client: httpx.Client, expected: Answers
) -> None:
    assert [classify(client, row) for row in expected.rows] == expected.labels
    openai = OpenAI(base_url=f"{client.base_url}/v1", api_key=secret("api_key"))
    for prompt, text in zip(PROMPTS, expected.texts, strict=True):
        stream = openai.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert "".join(c.choices[0].text for c in stream if c.choices) == text


def test_scaling_to_three_expert_workers_and_back_under_load_fails_nothing(
    containers: Containers, client: httpx.Client, expected: Answers
) -> None:
    with Load(client, expected) as load:
        containers.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "expert=3")
        containers.until_placed(3)
        load.until_right(20)
        containers.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "expert=2")
        containers.until_placed(2)
        load.until_right(20)
    assert (load.errors, load.wrong) == ({}, [])


def stop(containers: Containers, name: str) -> None:
    docker("stop", name)
    containers.until_placed(1)
    docker("start", name)


def kill(containers: Containers, name: str) -> None:
    # From inside, so that the engine takes it for a crash, not for an operator's order.
    docker("exec", name, "sh", "-c", "kill -9 -1", check=False)


def pause(containers: Containers, name: str) -> None:
    docker("pause", name)
    # The fault is that nothing is heard of the worker for this long: no event can stand for it.
    time.sleep(LOST_S)
    docker("unpause", name)


def cut_tensors(containers: Containers, name: str) -> None:
    _cut(containers, name, "tensors")


def cut_control(containers: Containers, name: str) -> None:
    _cut(containers, name, "control")


def _cut(containers: Containers, name: str, network: str) -> None:
    containers.disconnect(name, network)
    # As in ``pause``: the length is the fault.
    time.sleep(LOST_S)
    containers.connect(name, name.split("-")[-2], network)


def slowly(fault: Fault) -> Any:
    """Leave a fault to ``make nightly``."""
    return pytest.param(fault, marks=pytest.mark.slow)


@pytest.mark.parametrize("fault", [*map(slowly, (stop, pause, cut_control, cut_tensors)), kill])
def test_an_expert_worker_that_fails_under_load_costs_no_wrong_answer_and_is_taken_back(
    containers: Containers, client: httpx.Client, expected: Answers, fault: Fault
) -> None:
    name = containers.names("expert")[0]
    peer = "expert-" + docker("inspect", "-f", "{{.Config.Hostname}}", name).strip()
    before, linked = containers.starts(), _times_linked(containers, peer)
    with Load(client, expected) as load:
        fault(containers, name)
        eventually(lambda: _times_linked(containers, peer) > linked)
        containers.until_placed(2)
        load.until_right(20)
    _sound(load)
    after = containers.starts()
    restarted = {n for n in before if before[n] != after[n]}
    assert restarted <= {name}, "others were touched"
    # A network that is connected anew may be another interface: then the worker starts again by itself.
    assert fault is cut_tensors or bool(restarted) == (fault in (stop, kill))


@pytest.mark.parametrize("fault", [*map(slowly, (stop, pause, cut_control)), kill])
def test_requests_go_on_without_redis_and_its_return_needs_nobody(
    containers: Containers, client: httpx.Client, expected: Answers, fault: Fault
) -> None:
    (name,) = containers.names("redis")
    before = containers.starts()
    with Load(client, expected) as load:
        if fault is stop:
            docker("stop", name)
            load.until_right(40)
            docker("start", name)
        else:
            fault(containers, name)
        load.until_right(40)
        containers.until_ready()
    assert (load.errors, load.wrong) == ({}, [])
    after = containers.starts()
    restarted = {name} if fault in (stop, kill) else set()
    assert {n for n in before if before[n] != after[n]} == restarted, "others were touched"


def _sound(load: Load) -> None:
    assert load.wrong == []
    assert set(load.errors) <= TYPED, load.errors
    print(f"right: {load.num_right}, errors: {dict(load.errors)}, longest: {load.longest_s:.1f} s")


def _times_linked(containers: Containers, peer: str) -> int:
    """Count the attention worker's connections to an expert worker."""
    return sum(e["peer"] == peer for e in containers.events("attention", "expert_worker.linked"))
