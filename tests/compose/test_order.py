"""The services start in any order, wait for each other, and say in their logs for what."""

from collections.abc import Iterator

import pytest

from tests.compose.containers import Containers
from tests.compose.load import PROMPTS, Answers, stream
from tests.waiting import eventually

ORDERS = (
    ("attention", "gateway", "expert", "scheduler", "redis"),
    ("redis", "gateway", "attention", "expert", "scheduler"),
)
# What a service waits for when all that came before it in an order is there already.
WAITS = {
    ORDERS[0]: {"attention": "redis", "gateway": "redis", "expert": "redis", "scheduler": "redis"},
    ORDERS[1]: {
        "gateway": "attention",
        "attention": "a placement",
        "expert": "a placement",
    },
}


@pytest.fixture
def empty() -> Iterator[Containers]:
    """A project with no container yet."""
    project = Containers("moesaic-order", port=18701)
    try:
        yield project
    finally:
        project.down()


# Without Redis each service waits alone, too, in the tests of images: that order is left to ``make nightly``.
@pytest.mark.parametrize(
    "order",
    [pytest.param(ORDERS[0], marks=pytest.mark.slow), ORDERS[1]],
    ids=lambda order: "-".join(order),
)
def test_services_start_in_any_order(
    empty: Containers, expected: Answers, order: tuple[str, ...]
) -> None:
    for service in order:
        empty.compose("up", "-d", "--no-build", "--no-deps", service)
        if awaited := WAITS[order].get(service):
            eventually(lambda s=service, a=awaited: _waits(empty, s, a))
    empty.until_ready()
    with empty.client() as client:
        assert stream(client, PROMPTS[0]) == expected.texts[0]


def test_the_local_profile_needs_no_expert_workers(expected: Answers) -> None:
    local = Containers("moesaic-local", port=18702, profile="local")
    try:
        local.compose("up", "-d", "--wait", "--wait-timeout", "120", "--no-build")
        assert "expert" not in {c["Service"] for c in local.containers()}
        with local.client() as client:
            assert [stream(client, prompt) for prompt in PROMPTS] == expected.texts
    finally:
        local.down()


def _waits(containers: Containers, service: str, awaited: str) -> bool:
    said = containers.events(service, "service.waiting")
    return any(awaited in str(entry["waiting_for"]) for entry in said)
