"""What the files of the deployment promise, read from the files alone: no container engine is asked."""

import hashlib
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import SecretStr

from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.edge_agent.settings import EdgeAgentSettings
from moesaic.services.expert.settings import ExpertSettings
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.scheduler.settings import SchedulerSettings
from moesaic.settings import ServiceSettings
from tests.suites import ROOT

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "attention": AttentionSettings,
    "attention-local": AttentionSettings,
    "expert": ExpertSettings,
    "edge-agent": EdgeAgentSettings,
}
OVERRIDES = ("compose.gpu.yaml", "compose.tls.yaml")
FILES = ("compose.yaml", *OVERRIDES)
# Images of others, with the users that they are made for.
OF_OTHERS = {"redis": "redis", "prometheus": "65534:65534", "grafana": "472:0"}
HARDENING = ("user", "read_only", "cap_drop", "security_opt", "init")
OPENINGS = ("privileged", "pid", "ipc", "uts", "userns_mode", "cgroup", "volumes_from")


def read(file: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / file).read_text(encoding="utf-8")))


def services(file: str) -> dict[str, dict[str, Any]]:
    return dict(read(file)["services"])


def by_default(text: str) -> str:
    """What compose makes of a value when no variable is set."""
    return re.sub(r"\$\{\w+(?::?[-?]([^}]*))?\}", lambda match: match[1] or "", text)


def variable(field: str) -> str:
    return f"MOESAIC_{field.upper()}"


def given_as_secrets(service: dict[str, Any]) -> set[str]:
    """The variables that a service finds as files."""
    targets = [s["target"] for s in service["secrets"] if isinstance(s, dict)]
    return {target.upper() for target in targets}


# compose.yaml and its overrides


@pytest.mark.parametrize("name", services("compose.yaml"))
def test_a_container_can_do_no_more_than_it_must(name: str) -> None:
    service = services("compose.yaml")[name]

    assert service["user"] == OF_OTHERS.get(name, "10001:10001")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True


@pytest.mark.parametrize("file", FILES)
def test_no_container_gets_a_way_to_its_host(file: str) -> None:
    for service in services(file).values():
        # Device memory is reached from other processes in one IPC namespace only.
        needed = {"ipc"} if file == "compose.gpu.yaml" else set()
        assert set(OPENINGS) & set(service) == needed
        assert "docker.sock" not in str(service)
        for volume in service.get("volumes", []):
            named = isinstance(volume, str) and volume.partition(":")[0] in read(file)["volumes"]
            assert named or volume["read_only"] is True


@pytest.mark.parametrize("file", OVERRIDES)
def test_an_override_takes_no_protection_away(file: str) -> None:
    for service in services(file).values():
        assert not {*HARDENING, "cap_add", "devices"} & set(service)


def test_only_gateway_and_dashboards_have_a_published_port_and_by_default_only_on_this_host() -> (
    None
):
    publishing = {n: s["ports"] for n, s in services("compose.yaml").items() if "ports" in s}

    assert [*publishing] == ["gateway", "grafana"]
    assert [by_default(port) for port in publishing["gateway"]] == ["127.0.0.1:8000:8000"]
    assert [by_default(port) for port in publishing["grafana"]] == ["127.0.0.1:3000:3000"]
    assert not any(s.get("ports") for file in OVERRIDES for s in services(file).values())


def test_the_networks_of_the_planes_have_no_way_out() -> None:
    networks = read("compose.yaml")["networks"]

    assert {name for name, network in networks.items() if network.get("internal")} == {
        "control",
        "tensors",
    }


def test_each_service_is_in_the_networks_of_its_planes_only() -> None:
    networks = {name: set(s["networks"]) for name, s in services("compose.yaml").items()}

    assert networks == {
        "redis": {"control"},
        "scheduler": {"control"},
        "gateway": {"edge", "control"},
        "attention": {"control", "tensors"},
        "attention-local": {"control"},
        "edge-agent": {"control", "tensors"},
        "expert": {"control", "tensors"},
        "prometheus": {"control", "observe"},
        "grafana": {"observe"},
    }


def test_a_container_is_not_ended_before_the_grace_time_of_its_service_is_over() -> None:
    for name, settings in SETTINGS.items():
        period = by_default(services("compose.yaml")[name]["stop_grace_period"])
        assert period.endswith("s")
        assert float(period[:-1]) > settings.model_fields["grace_s"].default


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_a_service_can_be_given(name: str) -> None:
    found = [services(file)[name] for file in ("compose.yaml", "compose.tls.yaml")]
    given = {key for service in found for key in service["environment"]}
    given |= {key for service in found for key in given_as_secrets(service)}
    wanted = {variable(field) for field in SETTINGS[name].model_fields}

    assert wanted - given == set()


@pytest.mark.parametrize("file", FILES)
def test_no_service_is_given_a_setting_that_it_does_not_have(file: str) -> None:
    for name, settings in SETTINGS.items():
        given = services(file).get(name, {}).get("environment", {})
        known = {variable(field) for field in settings.model_fields}
        assert {g for g in given if g.startswith("MOESAIC_")} <= known


@pytest.mark.parametrize("file", FILES)
def test_secrets_are_files_and_never_variables(file: str) -> None:
    compose = read(file)
    secret = {"MOESAIC_REDIS_URL", "REDIS_URL"} | {
        variable(field)
        for settings in SETTINGS.values()
        for field, info in settings.model_fields.items()
        if info.annotation is SecretStr
    }

    assert all([*source] == ["file"] for source in compose.get("secrets", {}).values())
    for service in compose["services"].values():
        environment = service.get("environment", {})
        assert not secret & set(environment)
        assert not any("redis://" in str(value) for value in environment.values())


@pytest.mark.parametrize("name", services("compose.yaml"))
def test_a_service_gets_the_secrets_of_its_own_role_only(name: str) -> None:
    secrets = services("compose.yaml")[name].get("secrets", [])
    sources = {s if isinstance(s, str) else s["source"] for s in secrets}
    of_others = {"redis": {"redis_users"}, "grafana": {"grafana_password"}, "prometheus": set()}
    if name in of_others:
        assert sources == of_others[name]
        return

    own = {f"redis_url_{name.removesuffix('-local')}", "cluster_secret"}
    own |= (
        {"block_secret"}
        if name in ("gateway", "edge-agent") or name.startswith("attention")
        else set()
    )
    own |= {"api_key"} if name == "gateway" else set()
    assert sources == own


# Dockerfile


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, its own ``FROM`` first; those before the first stage are left out."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("FROM "):
            found[line.split(" AS ")[1]] = []
        if found:
            found[[*found][-1]].append(line)
    return found


def ancestry(stage: str) -> list[str]:
    """A stage, what it is built from, and so on."""
    known = stages()
    line = [stage]
    while (parent := known[line[-1]][0].split()[1]) in known:
        line.append(parent)
    return line


def instructions(stage: str, name: str) -> list[str]:
    """The arguments of an instruction in a stage and those that it is built from, the earliest first."""
    lines = [line for s in reversed(ancestry(stage)) for line in stages()[s]]
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


FINAL = sorted({s["build"]["target"] for s in services("compose.yaml").values() if "build" in s})


def test_there_is_an_image_per_service_and_nothing_to_fetch_for_reading_the_file() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")

    assert FINAL == ["attention", "edge-agent", "expert", "gateway", "scheduler"]
    assert not re.search(r"(?im)^#\s*syntax\s*=", text)


@pytest.mark.parametrize("stage", FINAL)
def test_an_image_runs_its_service_as_nobody_in_particular_and_says_whether_it_serves(
    stage: str,
) -> None:
    assert instructions(stage, "USER")[-1] == "10001:10001"
    assert not any(line.startswith(("RUN", "COPY")) for line in stages()[stage][-2:])
    module = f"moesaic.services.{stage.replace('-', '_')}"
    assert instructions(stage, "ENTRYPOINT") == [f'["python", "-m", "{module}"]']
    assert "moesaic.cluster.rpc.health_probe" in instructions(stage, "HEALTHCHECK")[-1]


@pytest.mark.parametrize("stage", ["gateway", "scheduler"])
def test_images_without_torch_are_not_built_from_those_with_it(stage: str) -> None:
    assert "worker" not in ancestry(stage)
    assert "worker" in ancestry("expert")


def test_compiled_kernels_outlive_a_container_and_are_shared_by_no_two_roles() -> None:
    """A worker runs the code that it finds in its volume."""
    volumes: dict[str, set[str]] = {}
    for name, service in services("compose.gpu.yaml").items():
        (mounted,) = service["volumes"]
        volume, _, directory = mounted.partition(":")
        volumes.setdefault(volume, set()).add(name.removesuffix("-local"))
        (variable,) = instructions("worker", "ENV")[-1:]
        assert variable.startswith(f"TRITON_CACHE_DIR={directory}/")
        assert f"install -d -o 10001 -g 10001 {directory}" in instructions("worker", "RUN")

    assert set(volumes) == set(read("compose.gpu.yaml")["volumes"])
    assert all(len(roles) == 1 for roles in volumes.values())


@pytest.mark.parametrize("file", FILES)
def test_the_dockerfile_knows_every_build_argument(file: str) -> None:
    declared = set(re.findall(r"(?m)^ARG (\w+)", (ROOT / "deploy/Dockerfile").read_text()))

    for service in services(file).values():
        assert set(service.get("build", {}).get("args", {})) <= declared


# Secrets and Redis


def make_secrets(directory: Path) -> dict[str, str]:
    """What is in each file of a directory after ``make_secrets.py`` has run."""
    command = [sys.executable, str(ROOT / "deploy/make_secrets.py"), str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def users(acl: str) -> dict[str, list[str]]:
    """The rules of each user of an ACL file."""
    lines = [line.split() for line in acl.splitlines()]
    assert all(line[0] == "user" for line in lines)
    return {line[1]: line[2:] for line in lines}


def test_every_secret_that_compose_hands_out_is_made(tmp_path: Path) -> None:
    made = make_secrets(tmp_path / "secrets")

    wanted = {s["file"] for s in read("compose.yaml")["secrets"].values()}
    assert {f"deploy/secrets/{name}" for name in made} == wanted
    assert all(text.endswith("\n") and len(text) > 40 for text in made.values())


def test_containers_can_read_secrets_and_other_users_of_the_host_cannot(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    make_secrets(directory)

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o444}


def test_making_secrets_again_adds_what_is_missing_and_changes_nothing_else(tmp_path: Path) -> None:
    before = make_secrets(tmp_path)
    assert make_secrets(tmp_path) == before

    (tmp_path / "api_key").unlink()
    after = make_secrets(tmp_path)

    assert {name for name in before if before[name] != after[name]} == {"api_key"}


def test_redis_has_a_user_per_role_with_the_password_that_is_in_the_url_of_the_role(
    tmp_path: Path,
) -> None:
    made = make_secrets(tmp_path)
    rules = users(made["redis_users"])
    roles = {name.removesuffix("-local") for name in SETTINGS}

    assert set(rules) == roles | {"default", "health"}
    for role in roles:
        url = urlsplit(made[f"redis_url_{role}"].strip())
        assert (url.username, url.hostname, url.port) == (role, "redis", 6379)
        digest = hashlib.sha256((url.password or "").encode()).hexdigest()
        assert [rule for rule in rules[role] if rule[0] in "#>"] == [f"#{digest}"]
        assert "nopass" not in rules[role]


def test_no_user_of_redis_may_do_everything_or_touch_keys_of_others(tmp_path: Path) -> None:
    rules = users(make_secrets(tmp_path)["redis_users"])

    assert rules["default"][0] == "off"
    assert [rule for rule in rules["health"] if rule[0] in "+~%&"] == ["+ping"]
    for name, given in rules.items():
        assert "-@all" in given
        assert "resetkeys" in given
        assert not {"allkeys", "~*", "allcommands", "nocommands"} & set(given)
        assert not any(rule.lstrip("(").startswith("+@") for rule in given)
        keys = [rule.rstrip(")") for rule in given if rule[0] in "~%"]
        assert all(key.partition("~")[2].startswith("moesaic:{*}:") for key in keys), name


def test_redis_keeps_what_it_was_told_and_lets_in_only_users_it_knows() -> None:
    text = (ROOT / "deploy/redis.conf").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    settings = {name: value for name, _, value in (line.partition(" ") for line in lines)}

    assert settings["appendonly"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["aclfile"] == "/run/secrets/redis_users"
    assert len(settings) == len(lines)
