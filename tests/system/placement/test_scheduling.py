"""Replicas that are chosen batch by batch change no answer."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.suites import Suite, running
from tests.system.asking import PROMPTS, complete
from tests.system.streams import STREAMS, around_fault, check

SLOTS = "22"  # three workers' are enough for every expert to be on two of them


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three expert workers with spare slots."""
    flags = ("--experts", "3", "--slots-per-layer", SLOTS)
    with running(tmp_path_factory.mktemp("replicated"), *flags) as suite:
        yield suite


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_do_not_depend_on_which_replica_serves(
    local: Any, replicated: Any, prompt: str
) -> None:
    assert complete(replicated, prompt)["token_ids"] == complete(local, prompt)["token_ids"]


async def test_a_killed_replica_costs_no_request_and_changes_none(replicated: Any) -> None:
    before, after = await around_fault(
        replicated, lambda: replicated.signal("expert-1", signal.SIGKILL)
    )

    assert check(before, after) == STREAMS
    replicated.until_serving()
    for worker in ("expert-0", "expert-2"):
        assert replicated.metric(worker, "moesaic_experts_activated_sum") > 0
    assert replicated.metric("attention-0", "moesaic_gate_divergence_total") == 0
