"""The console's state of a real suite, and the same in the terminal."""

import msgspec

from moesaic.services.gateway.console.state import ClusterState, ExpertMap
from tests.suites import Suite


def state_of(suite: Suite) -> ClusterState:
    with suite.client() as client:
        found = client.get("/v1/moesaic/state")
    assert found.status_code == 200, found.text
    return msgspec.json.decode(found.content, type=ClusterState)


def test_processes_experts_and_decisions_of_a_suite_are_shown(disaggregated: Suite) -> None:
    answer = disaggregated.cli("generate", "Once upon a time", "--max-tokens", "20")
    assert answer.returncode == 0, answer.stderr
    with disaggregated.client() as client:
        experts = msgspec.json.decode(client.get("/v1/moesaic/experts").content, type=ExpertMap)
    state = _with_rate(disaggregated)

    by_role: dict[str, list[str]] = {}
    for service in state.services:
        by_role.setdefault(service.role, []).append(service.id)
    assert by_role["gateway"] == [state.gateway]
    assert len(by_role["attention"]) >= 1
    assert len(by_role["expert"]) >= 2
    holders = [service for service in state.services if service.role == "expert"]
    assert sum(service.experts for service in holders) >= experts.num_experts * len(experts.layers)
    assert all(held for by_expert in experts.holders for held in by_expert)
    assert (state.ready, state.brownout is not None, state.scaling is not None) == (True,) * 3
    assert any(decision.kind == "placement" for decision in state.decisions)


def _with_rate(suite: Suite) -> ClusterState:
    """Wait for a second sample, which rates take."""
    with suite.client() as client, client.stream("GET", "/v1/moesaic/events") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                state = msgspec.json.decode(line.removeprefix("data: "), type=ClusterState)
                loads = [each.load for each in state.services if each.role == "attention"]
                if loads and all(load and load.rows_per_s is not None for load in loads):
                    return state
    raise AssertionError("the events ended before there were rates")


def test_top_prints_the_same_once_where_there_is_no_terminal(disaggregated: Suite) -> None:
    shown = disaggregated.cli("top")
    assert shown.returncode == 0, shown.stderr
    names = [service.id for service in state_of(disaggregated).services]
    assert all(name in shown.stdout for name in names)
    assert "brownout" in shown.stdout
