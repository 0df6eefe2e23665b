"""Ports that can be reached from each network, and commands that Redis allows each user."""

import json

import pytest

from tests.compose.containers import Containers, docker, secret
from tests.deploy.rights import DANGEROUS, FOREIGN, OWN

PORTS = (6379, 7000, 7100, 8000, 9000)
IMAGE = "moesaic-gateway:test"  # has Python and a Redis client

CONNECT = """
import asyncio, json, sys
async def open_(host, port):
    try:
        async with asyncio.timeout(10):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    except OSError:
        return False
async def main():
    places = [(h, p) for h in sys.argv[1].split(",") for p in map(int, sys.argv[2].split(","))]
    found = await asyncio.gather(*(open_(*place) for place in places))
    print(json.dumps([place for place, there in zip(places, found) if there]))
asyncio.run(main())
"""

ASK_REDIS = """
import json, os, sys, redis
client = redis.Redis.from_url(os.environ["URL"], protocol=2, socket_timeout=60)
for command in json.loads(sys.argv[1]):
    try:
        client.execute_command(*command)
        print("done")
    except redis.exceptions.RedisError as error:
        print(type(error).__name__)
"""


def reachable(network: str, hosts: list[str]) -> list[tuple[str, int]]:
    """List the ports of the hosts that a stranger on a network can connect to."""
    run = ("run", "--rm", "--network", network, "--entrypoint", "python", IMAGE)
    found = docker(*run, "-c", CONNECT, ",".join(hosts), ",".join(map(str, PORTS)))
    return [(host, port) for host, port in json.loads(found)]


def addresses(containers: Containers) -> dict[str, dict[str, str]]:
    """By service and network, the address of its first container."""
    found: dict[str, dict[str, str]] = {}
    for container in containers.containers():
        shown = docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", container["Name"])
        networks = {
            name.removeprefix(f"{containers.project}_"): network["IPAddress"]
            for name, network in json.loads(shown).items()
        }
        found.setdefault(container["Service"], networks)
    return found


def ask_redis(containers: Containers, url: str, *commands: tuple[str, ...]) -> list[str]:
    """Return the outcome of each Redis command: ``done`` or the kind of error."""
    network = f"{containers.project}_control"
    run = ("run", "--rm", "--network", network, "-e", "URL", "--entrypoint", "python", IMAGE)
    return docker(*run, "-c", ASK_REDIS, json.dumps(commands), env={"URL": url}).split()


def test_only_the_gateway_publishes_a_port_and_only_on_this_host(containers: Containers) -> None:
    containers.until_ready()
    published = {
        (c["Service"], p["URL"], p["PublishedPort"])
        for c in containers.containers()
        for p in c["Publishers"] or ()
        if p["PublishedPort"]
    }
    assert published == {("gateway", "127.0.0.1", containers.port)}


def test_a_container_outside_reaches_nothing(containers: Containers) -> None:
    containers.until_ready()
    everything = [a for networks in addresses(containers).values() for a in networks.values()]
    docker("network", "create", "moesaic-test-outside")
    try:
        assert reachable("moesaic-test-outside", everything) == []
    finally:
        docker("network", "rm", "moesaic-test-outside")


def test_beside_the_gateway_only_its_rest_port_is_reachable(containers: Containers) -> None:
    containers.until_ready()
    known = addresses(containers)
    everything = [a for networks in known.values() for a in networks.values()]
    found = reachable(f"{containers.project}_edge", everything)
    assert found == [(known["gateway"]["edge"], 8000)]


def test_every_port_is_open_only_on_the_network_of_its_plane(
    containers: Containers,
) -> None:
    containers.until_ready()
    known = addresses(containers)
    expert, attention = known["expert"], known["attention"]
    on_tensors = reachable(
        f"{containers.project}_tensors", [expert["tensors"], attention["tensors"]]
    )
    assert (expert["tensors"], 7100) in on_tensors
    assert all(port == 7100 for _, port in on_tensors)
    gateway, redis = known["gateway"]["control"], known["redis"]["control"]
    found = reachable(f"{containers.project}_control", [expert["control"], gateway, redis])
    admin_and_metrics = {
        (host, port) for host in (expert["control"], gateway) for port in (7000, 9000)
    }
    assert set(found) == {*admin_and_metrics, (redis, 6379)}


@pytest.mark.parametrize("role", OWN)
def test_redis_refuses_a_role_the_keys_of_others_and_every_dangerous_command(
    containers: Containers, role: str
) -> None:
    commands = [OWN[role], *FOREIGN[role], *DANGEROUS]
    answers = ask_redis(containers, secret(f"redis_url_{role}"), *commands)
    assert answers == ["done", *["NoPermissionError"] * (len(commands) - 1)]


def test_redis_refuses_strangers(containers: Containers) -> None:
    ping = ("PING",)
    assert ask_redis(containers, "redis://redis:6379/0", ping) == ["AuthenticationError"]
    wrong = "redis://expert:wrong@redis:6379/0"
    assert ask_redis(containers, wrong, ping) == ["AuthenticationError"]
    health = "redis://health:any@redis:6379/0"
    keys = ("GET", "moesaic:{default}:workers")
    assert ask_redis(containers, health, ping, keys) == ["done", "NoPermissionError"]
