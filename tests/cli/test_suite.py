from types import SimpleNamespace

import pytest

from moesaic.cli.checks.sizes import read_memory
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.processes import (
    STOP_ORDER,
    Service,
    module_of,
    roles_of,
    services_of,
    url_of,
)
from moesaic.cli.terminal.outcome import CommandError, Exit


def options(**changes: object) -> SuiteOptions:
    values = {
        "topology": "disaggregated",
        "model": "m",
        "attention": 1,
        "experts": 2,
        "slots_per_layer": 0,
        "host": "127.0.0.1",
        "port": 8000,
    }
    return SuiteOptions(**{**values, **changes})  # type: ignore[arg-type]


def flag(service: Service, name: str) -> str:
    return service.flags[service.flags.index(name) + 1]


def test_the_experts_fit_into_the_workers_by_default() -> None:
    services = services_of(options(experts=3), num_experts=32, cores=8)

    experts = [service for service in services if service.role == "expert"]

    assert [flag(expert, "--slots-per-layer") for expert in experts] == ["11", "11", "11"]


def test_too_few_slots_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(CommandError, match="--slots-per-layer 16 or more") as raised:
        services_of(options(slots_per_layer=15), num_experts=32, cores=8)

    assert raised.value.status == Exit.USAGE


def test_further_workers_begin_on_standby_and_the_others_have_slots_for_all_experts() -> None:
    wanted = options(standby_attention=1, standby_experts=2)
    services = services_of(wanted, num_experts=32, cores=8)

    resting = [service.name for service in services if "--standby" in service.flags]
    assert resting == ["expert-2", "expert-3", "attention-1"]
    experts = [service for service in services if service.role == "expert"]
    assert {flag(expert, "--slots-per-layer") for expert in experts} == {"16"}
    flags = wanted.flags
    assert flags[flags.index("--standby-experts") + 1] == "2"


def test_the_local_topology_has_no_expert_workers() -> None:
    services = services_of(options(topology="local", attention=2), num_experts=32, cores=8)

    assert [s.name for s in services] == ["scheduler", "attention-0", "attention-1", "gateway"]
    assert flag(services[1], "--dispatch") == "local"


def test_computing_processes_share_the_cores() -> None:
    services = services_of(options(attention=1, experts=3), num_experts=8, cores=16)

    attention = next(service for service in services if service.role == "attention")

    assert flag(attention, "--threads") == "8"  # half of the cores, as all experts together
    assert dict(attention.environment) == {"OMP_NUM_THREADS": "8"}
    experts = [service for service in services if service.role == "expert"]
    assert [flag(service, "--threads") for service in experts] == ["2", "2", "2"]


def test_threads_wait_passively_where_processes_outnumber_cores() -> None:
    services = services_of(options(), num_experts=8, cores=2)

    threads = {"attention": "2", "expert": "1"}  # they take turns on the cores
    for service in services:
        expected = {}
        if service.role in threads:
            expected = {"OMP_NUM_THREADS": threads[service.role], "OMP_WAIT_POLICY": "passive"}
        assert dict(service.environment) == expected


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_url_can_be_called_from_this_machine(host: str, url: str) -> None:
    assert url_of(options(host=host), SimpleNamespace()) == url


def test_a_gateway_with_a_certificate_is_called_by_https() -> None:
    asking = SimpleNamespace(ssl_certfile="a", ssl_cert_reqs=1)
    assert url_of(options(), asking) == "https://127.0.0.1:8000"
    with pytest.raises(CommandError, match="--ssl-cert-reqs 2"):
        url_of(options(), SimpleNamespace(ssl_certfile="a", ssl_cert_reqs=2))


@pytest.mark.parametrize("topology", ["gathered", "all-to-all"])
def test_attention_workers_that_share_experts_have_a_part_each(topology: str) -> None:
    services = services_of(options(topology=topology, attention=3), num_experts=32, cores=8)

    workers = [service for service in services if service.role == "attention"]

    assert not [service for service in services if service.role == "expert"]
    assert [flag(worker, "--share") for worker in workers] == ["0/3", "1/3", "2/3"]
    assert {flag(worker, "--dispatch") for worker in workers} == {topology}


def test_experts_are_offloaded_where_that_is_asked_for() -> None:
    for topology in ("local", "gathered"):
        services = services_of(options(topology=topology, offload=True), num_experts=32, cores=8)

        assert "--offload" in services[1].flags


def test_agents_have_the_memory_and_the_threads_that_they_share() -> None:
    sizes = (40_000_000, 40_000_000, 80_000_000)
    edge = options(topology="edge", agents=3, memory="40M,40M,80M")

    services = services_of(edge, num_experts=32, cores=6)

    names = ["scheduler", "agent-0", "agent-1", "agent-2", "gateway"]
    assert [service.name for service in services] == names
    agents = services[1:-1]
    assert {agent.role for agent in agents} == {"edge-agent"}
    assert [int(flag(agent, "--memory-bytes")) for agent in agents] == [*sizes]
    assert {flag(agent, "--threads") for agent in agents} == {"2"}
    assert {flag(agent, "--host") for agent in agents} == {"127.0.0.1"}
    assert not [agent for agent in agents if "--dispatch" in agent.flags]


def test_agents_without_a_given_memory_decide_themselves() -> None:
    services = services_of(options(topology="edge", agents=2), num_experts=32, cores=2)

    assert not [service for service in services if "--memory-bytes" in service.flags]
    assert services[1].environment["OMP_WAIT_POLICY"] == "passive"


def test_a_role_has_a_module_and_a_place_in_the_order_of_stopping() -> None:
    assert module_of("edge-agent") == "moesaic.services.edge_agent"
    for topology in ("local", "edge", "disaggregated"):
        assert set(roles_of(topology)) <= set(STOP_ORDER)


def test_a_detached_suite_has_the_same_agents() -> None:
    edge = options(topology="edge", agents=2, memory="40M,1GiB")

    flags = edge.flags

    assert flags[flags.index("--agents") + 1] == "2"
    assert read_memory(flags[flags.index("--memory") + 1], 2) == edge.memory_bytes
    assert not {"--attention", "--experts"} & {*flags}


def test_a_detached_suite_is_told_usual_values_too_as_variables_may_say_others() -> None:
    flags = options(port=8000, experts=2).flags

    assert flags[flags.index("--experts") + 1] == "2"
    assert flags[flags.index("--port") + 1] == "8000"
    assert "--agents" not in flags
