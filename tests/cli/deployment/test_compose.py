"""``moesaic deploy compose``: the files of a cluster, from the description that a person writes."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cli.deployment.checks import checked, problems_of_ports
from moesaic.cli.deployment.cluster import deploy
from moesaic.cli.deployment.compose_file import EVERY, REDIS_PORT, as_yaml, compose_of
from moesaic.cli.deployment.hosts import HostsFile
from moesaic.cli.deployment.output import compose_is_there
from moesaic.cli.deployment.services import services_of
from moesaic.cli.terminal.outcome import CommandError, Exit
from tests.cli.conftest import CONFIG, Run
from tests.suites import ROOT

SNAPSHOT = Path(__file__).with_name("two_hosts")
# The shape of Qwen3-235B-A22B, whose experts no GPU holds alone.
LARGE = CONFIG | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TWO_HOSTS = (ROOT / "deploy/hosts.toml").read_text("utf-8")
TWO_HOSTS = TWO_HOSTS.replace("/srv/models/Qwen3-30B-A3B", "MODEL").replace("80G", "141G")
SMALL = """
model = "MODEL"
[hosts.a]
control = "10.0.0.1"
attention = 1
[hosts.b]
control = "10.0.0.2"
expert = 2
settings = {threads = 2}
"""
SHARED = """
model = "MODEL"
gpu_memory = "24G"
[hosts.a]
control = "10.0.0.1"
attention = [0]
expert = [0, 1]
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def written(directory: Path, description: str) -> dict[str, Any]:
    """The contents of the compose files that a description makes, by host, as a YAML parser reads them."""
    hosts = directory / "hosts.toml"
    hosts.write_text(description.replace("MODEL", str(directory / "model")))
    _, contents = deploy(hosts, directory / "cluster")
    files = {name: directory / "cluster" / name / f"{name}.yaml" for name in contents}
    read = {name: yaml.safe_load(file.read_text("utf-8")) for name, file in files.items()}
    assert read == contents
    return read


def refusal(directory: Path, description: str) -> str:
    with pytest.raises(CommandError) as caught:
        written(directory, description)
    assert caught.value.status == Exit.USAGE
    assert not (directory / "cluster").exists()
    return str(caught.value).replace(f"{directory / 'hosts.toml'}: ", "")


def environment(contents: dict[str, Any], host: str, service: str) -> dict[str, str]:
    return dict(contents[host]["services"][service]["environment"])


def test_the_files_of_two_hosts_with_four_gpus_each_are_those_that_are_committed(
    tmp_path: Path, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(LARGE))

    written(tmp_path, TWO_HOSTS)

    for name in ("alpha", "beta"):
        made = (tmp_path / "cluster" / name / f"{name}.yaml").read_text("utf-8")
        assert made.replace(str(model), "/srv/model") == (SNAPSHOT / f"{name}.yaml").read_text()


def test_the_example_of_the_page_is_the_example_file() -> None:
    page = (ROOT / "docs/operate/cluster.md").read_text("utf-8")
    example = page.partition("```toml\n")[2].partition("```")[0]

    assert (ROOT / "deploy/hosts.toml").read_text("utf-8").endswith(f"\n\n{example}")


def test_every_expert_has_a_slot_and_slots_fit_into_the_memory(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LARGE))

    made = written(tmp_path, TWO_HOSTS)

    workers = [
        environment(made, host, name)
        for host, found in made.items()
        for name in found["services"]
        if name.startswith("expert")
    ]
    assert len(workers) == 6
    one_slot = 94 * 3 * 4096 * 1536 * 2
    for worker in workers:
        slots = int(worker["MOESAIC_SLOTS_PER_LAYER"])
        assert slots * 6 > 128
        assert slots * one_slot < int(worker["MOESAIC_MAX_EXPERT_BYTES"]) < 0.9 * 141e9


def test_a_worker_sees_all_gpus_of_its_host_and_computes_on_its_own(
    tmp_path: Path, model: Path
) -> None:
    made = written(tmp_path, TWO_HOSTS)
    devices = {}
    for host, found in made.items():
        for name, service in found["services"].items():
            if not name.startswith(("attention", "expert")):
                assert "deploy" not in service
                continue
            [gpus] = service["deploy"]["resources"]["reservations"]["devices"]
            assert gpus["device_ids"] == ["0", "1", "2", "3"]
            assert (service["ipc"], service["pid"]) == ("host", "host")
            devices[host, name] = service["environment"]["MOESAIC_DEVICE"]

    assert devices == {
        ("alpha", "attention-0"): "cuda:0",
        ("alpha", "expert-0"): "cuda:2",
        ("alpha", "expert-1"): "cuda:3",
        **{("beta", f"expert-{n}"): f"cuda:{n}" for n in range(4)},
    }
    assert environment(made, "alpha", "attention-0")["MOESAIC_TENSOR_PARALLEL"] == "2"


def test_gpus_are_counted_among_those_that_the_containers_see(tmp_path: Path, model: Path) -> None:
    others = TWO_HOSTS.replace("expert = [0, 1, 2, 3]", "expert = [5, 7]")

    made = written(tmp_path, others)["beta"]["services"]

    for name, device in (("expert-0", "cuda:0"), ("expert-1", "cuda:1")):
        [gpus] = made[name]["deploy"]["resources"]["reservations"]["devices"]
        assert gpus["device_ids"] == ["5", "7"]
        assert made[name]["environment"]["MOESAIC_DEVICE"] == device


def test_workers_that_share_a_gpu_divide_its_memory(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 4}))

    made = written(tmp_path, SHARED)

    attention = environment(made, "a", "attention-0")
    expert = environment(made, "a", "expert-0")
    kv = int(attention["MOESAIC_KV_BLOCKS"]) * 16 * 4 * 4 * 2 * 128 * 2
    held = int(expert["MOESAIC_SLOTS_PER_LAYER"]) * 4 * 3 * 4096 * 1536 * 2
    table = 2 * 151936 * 4096 * 2
    assert held + kv + table < 0.9 * 24e9
    assert "MOESAIC_KV_BLOCKS" not in environment(made, "a", "expert-1")


def test_each_rank_has_all_that_is_not_divided(tmp_path: Path, model: Path) -> None:
    # The first rank has the whole embedding, and half of the head.
    numbers = {"num_hidden_layers": 4, "vocab_size": 1_000_000, "max_position_embeddings": 1024}
    (model / "config.json").write_text(json.dumps(LARGE | numbers))
    described = TWO_HOSTS.replace("expert = [0, 1, 2, 3]", "expert = [0, 1, 2, 3, 4, 5]")
    embedding, half_a_head = 1_000_000 * 4096 * 2, 1_000_000 * 4096

    said = refusal(tmp_path, described.replace("141G", "14G"))

    told = re.search(
        r"GPU (\d) of host (\w+): its workers need ([\d.]+) GiB, and may take ([\d.]+) GiB, ([\d.]+) GiB too few",
        said,
    )
    assert told is not None, said
    assert told.groups()[:2] == ("0", "alpha")
    need, room, lacking = (float(each) * 2**30 for each in told.groups()[2:])
    # Both GPUs together have room for it.
    assert embedding + half_a_head < need < 2 * room
    assert lacking == pytest.approx(need - room, abs=2 * 0.05 * 2**30)
    written(tmp_path, described.replace("141G", "19G"))


def test_slots_that_are_given_leave_the_rest_to_others(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 48}))
    described = TWO_HOSTS.replace("expert = [2, 3]", "expert = [2]").replace(
        "expert = [0, 1, 2, 3]", "expert = [0, 1]\nsettings = {slots_per_layer = 60}"
    )

    made = written(tmp_path, described)

    given = environment(made, "beta", "expert-0")
    open_ = environment(made, "alpha", "expert-0")
    assert given["MOESAIC_SLOTS_PER_LAYER"] == "60"
    assert 8 <= int(open_["MOESAIC_SLOTS_PER_LAYER"]) < 128
    assert given["MOESAIC_MAX_EXPERT_BYTES"] == open_["MOESAIC_MAX_EXPERT_BYTES"]


def test_workers_on_gpus_of_unknown_memory_decide_for_themselves(
    tmp_path: Path, model: Path
) -> None:
    made = written(tmp_path, SHARED.replace('gpu_memory = "24G"', ""))

    for name in ("attention-0", "expert-0", "expert-1"):
        decided = {"MOESAIC_KV_BLOCKS", "MOESAIC_SLOTS_PER_LAYER", "MOESAIC_MAX_EXPERT_BYTES"}
        assert not decided & set(environment(made, "a", name))


def test_on_cpus_experts_are_divided_and_no_gpu_is_asked_for(tmp_path: Path, model: Path) -> None:
    made = written(tmp_path, SMALL)

    for name in ("expert-0", "expert-1"):
        service = made["b"]["services"][name]
        assert service["environment"]["MOESAIC_SLOTS_PER_LAYER"] == "4"
        assert service["environment"]["MOESAIC_THREADS"] == "2"
        assert not {"deploy", "devices", "cap_add"} & set(service)
    lone = made["a"]["services"]["attention-0"]
    assert not {"ipc", "pid"} & set(lone)
    assert lone["environment"]["MOESAIC_DISPATCH"] == "routed"


def test_services_have_the_protection_that_compose_gives_them_on_one_host(
    tmp_path: Path, model: Path
) -> None:
    one_host = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["x-service"]
    made = written(tmp_path, TWO_HOSTS)

    assert {k: v for k, v in EVERY.items() if k != "network_mode"} == {
        k: v for k, v in one_host.items() if k != "stop_grace_period"
    }
    for found in made.values():
        for name, service in found["services"].items():
            # None of the others is the workers' user, whose processes see all of the host.
            others = {"redis": "redis", "scheduler": "10002:10002", "gateway": "10002:10002"}
            assert service["user"] == others.get(name, "10001:10001")
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert not {"privileged", "ports", "networks", "build"} & set(service)


def test_redis_runs_as_compose_runs_it_on_one_host(tmp_path: Path, model: Path) -> None:
    one_host = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]["redis"]
    made = written(tmp_path, SMALL)["a"]["services"]["redis"]

    same = ("configs", "secrets", "volumes", "healthcheck", "user", "stop_grace_period")
    assert {name: made[name] for name in same} == {name: one_host[name] for name in same}
    assert made["command"] == [*one_host["command"], "--bind", "127.0.0.1", "10.0.0.1"]
    assert (tmp_path / "cluster/a/redis.conf").read_bytes() == (
        ROOT / "deploy/redis.conf"
    ).read_bytes()


def test_a_host_has_the_secrets_of_its_own_services_only(tmp_path: Path, model: Path) -> None:
    written(tmp_path, SMALL)
    found = {
        name: {file.name: file.read_text() for file in (tmp_path / "cluster" / name).iterdir()}
        for name in ("a/secrets", "b/secrets")
    }

    assert set(found["b/secrets"]) == {"cluster_secret", "redis_url_expert"}
    assert set(found["a/secrets"]) == {
        *("api_key", "block_secret", "cluster_secret", "redis_users"),
        *("redis_url_attention", "redis_url_gateway", "redis_url_scheduler"),
    }
    assert found["a/secrets"]["cluster_secret"] == found["b/secrets"]["cluster_secret"]
    url = urlsplit(found["b/secrets"]["redis_url_expert"].strip())
    assert (url.username, url.hostname, url.port, url.path) == ("expert", "10.0.0.1", 6379, "/0")
    for directory in ("a", "a/secrets", "secrets"):
        assert stat.S_IMODE((tmp_path / "cluster" / directory).stat().st_mode) == 0o700


def test_writing_again_keeps_the_secrets_and_changes_what_the_description_changes(
    tmp_path: Path, model: Path
) -> None:
    written(tmp_path, SMALL)
    secret = tmp_path / "cluster/b/secrets/cluster_secret"
    before = secret.read_text()

    made = written(tmp_path, SMALL.replace("10.0.0.1", "10.0.0.9"))

    assert secret.read_text() == before
    assert environment(made, "a", "gateway")["MOESAIC_CONTROL_HOST"] == "10.0.0.9"
    assert "@10.0.0.9:6379/0" in (tmp_path / "cluster/b/secrets/redis_url_expert").read_text()


def test_a_directory_of_somebody_else_stays(tmp_path: Path, model: Path) -> None:
    theirs = tmp_path / "cluster" / "b"
    theirs.mkdir(parents=True)
    (theirs / "notes").touch()

    with pytest.raises(CommandError, match="this command has not written it"):
        written(tmp_path, SMALL)

    assert [*(tmp_path / "cluster").rglob("*")] == [theirs, theirs / "notes"]


def test_settings_reach_the_services_that_have_them_and_those_of_a_host_come_first(
    tmp_path: Path, model: Path
) -> None:
    described = SMALL.replace("[hosts.a]", "settings = {grace_s = 60, threads = 9}\n[hosts.a]")

    made = written(tmp_path, described)

    assert environment(made, "a", "attention-0")["MOESAIC_THREADS"] == "9"
    assert environment(made, "b", "expert-1")["MOESAIC_THREADS"] == "2"
    assert "MOESAIC_THREADS" not in environment(made, "a", "gateway")
    assert made["b"]["services"]["expert-0"]["stop_grace_period"] == "75s"


def test_roles_may_be_on_any_host_and_images_anywhere(tmp_path: Path, model: Path) -> None:
    described = SMALL.replace("[hosts.a]", 'images = "lab/"\nsource = "/srv/moesaic"\n[hosts.a]')
    described = described.replace("attention = 1", 'attention = 1\nservices = ["gateway"]')
    described = described.replace("expert = 2", 'expert = 2\nservices = ["redis", "scheduler"]')

    made = written(tmp_path, described)

    assert [*made["a"]["services"]] == ["gateway", "attention-0"]
    assert [*made["b"]["services"]] == ["redis", "scheduler", "expert-0", "expert-1"]
    expert = made["b"]["services"]["expert-0"]
    assert expert["image"] == "lab/moesaic-expert:dev"
    assert expert["build"]["context"] == "/srv/moesaic"
    assert expert["build"]["target"] == "expert"


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    """Clusters of several hosts, each with workers on its CPU or on its GPUs."""
    hosts: dict[str, dict[str, Any]] = {}
    for number in range(draw(st.integers(1, 4))):
        host: dict[str, Any] = {"control": f"10.0.0.{number + 1}"}
        gpus = sorted(draw(st.sets(st.integers(0, 7), max_size=6)))
        if gpus:
            first = draw(st.integers(0, len(gpus)))
            ranks = draw(st.booleans()) and first > 1
            host["attention"] = [gpus[:first]] if ranks else gpus[:first]
            host["expert"] = gpus[first:] if ranks else draw(st.permutations(gpus))
        else:
            host["attention"], host["expert"] = draw(st.integers(0, 3)), draw(st.integers(0, 5))
            host["settings"] = {"threads": 1}
        hosts[f"h{number}"] = host
    hosts["h0"]["attention"] = hosts["h0"]["attention"] or ([0] if hosts["h0"]["expert"] else 1)
    if isinstance(hosts["h0"]["attention"], list) and isinstance(hosts["h0"]["expert"], int):
        hosts["h0"]["attention"] = 1
    return {"model": "/srv/model", "hosts": hosts}


@given(descriptions())
@settings(max_examples=60)
def test_any_cluster_has_ports_names_and_secrets_that_fit_together(raw: dict[str, Any]) -> None:
    cluster = msgspec.convert(raw, HostsFile)
    services = services_of(cluster)

    assert [*problems_of_ports(services, REDIS_PORT)] == []
    assert checked(services)[1] == []
    ids = [each.worker_id for each in services if each.role != "redis"]
    assert len(ids) == len(set(ids))
    for name, host in cluster.hosts.items():
        own = [each for each in services if each.host == name]
        made = yaml.safe_load(as_yaml(compose_of(cluster, name, own)))
        for service in made["services"].values():
            named = {s if isinstance(s, str) else s["source"] for s in service["secrets"]}
            assert named <= set(made["secrets"])
            volumes = [
                v.partition(":")[0] for v in service.get("volumes", []) if isinstance(v, str)
            ]
            assert set(volumes) <= set(made.get("volumes", {}))
        devices = [each.settings.get("device", "cpu") for each in own if each.worker]
        assert devices == [
            f"cuda:{host.gpus.index(gpus[0])}" if gpus else "cpu" for _, gpus in host.workers
        ]


def test_a_dollar_is_no_variable_of_compose() -> None:
    assert yaml.safe_load(as_yaml({"a": ["x$y: #"], "b": [{"c": [], "d": {"e": True}}]})) == {
        "a": ["x$$y: #"],
        "b": [{"c": [], "d": {"e": True}}],
    }


WRONG = {
    "no TOML": ("model = ", "must be a TOML file"),
    "unknown field": (SMALL.replace("control", "contorl", 1), "hosts.a: .*did you mean control?"),
    "unknown table": (SMALL.replace("[hosts.b]", "[host.b]"), "unknown field `host`.*hosts?"),
    "missing address": (SMALL.replace('control = "10.0.0.2"', ""), "hosts.b: .*field `control`"),
    "no hosts": ('model = "MODEL"\n[hosts]\n', "hosts: there is none"),
    "no address": (SMALL.replace("10.0.0.2", "10.0.0.256"), "hosts.b.control: must be an IP addr"),
    "loopback": (SMALL.replace("10.0.0.2", "127.0.0.1"), "hosts.b.control: must be an IP address"),
    "address of another": (
        SMALL.replace("10.0.0.2", "10.0.0.1"),
        "that of hosts.a.control|the add",
    ),
    "bad data address": (TWO_HOSTS.replace("10.1.0.2", "::"), "hosts.beta.data: must be an IP"),
    "bad name": (SMALL.replace("hosts.b", 'hosts."B b"'), "a name has lower-case letters"),
    "text as GPUs": (SMALL.replace("attention = 1", 'attention = "0"'), "hosts.a.attention: expec"),
    "negative": (SMALL.replace("expert = 2", "expert = -2"), "hosts.b.expert: must be a number of"),
    "GPU named twice": (SHARED.replace("[0, 1]", "[1, 1]"), "hosts.a.expert: GPU 1 is named 2 ti"),
    "GPU twice in a worker": (SHARED.replace("[0]", "[[2, 2]]"), "hosts.a.attention: a GPU is a"),
    "no neighbours": (SHARED.replace("[0]", "[[0, 2]]"), "hosts.a.attention: .*neighbours"),
    "shared ranks": (
        SHARED.replace("[0]", "[[0, 1]]"),
        "no other worker may have GPUs of a worker",
    ),
    "CPU and GPU": (SHARED.replace("[0, 1]", "1"), "hosts.a.attention, expert: give GPUs to all"),
    "no size": (SHARED.replace("24G", "much"), "gpu_memory much: it must be a number with a unit"),
    "no memory": (
        SHARED.replace("24G", "1G"),
        "gpu_memory: GPU 0 of host a: its workers need .*GiB too few",
    ),
    "no memory for all": (
        SHARED.replace("24G", "2G").replace("expert = [0, 1]", ""),
        "GPU 0 of host a: its workers need .* with all experts",
    ),
    "RDMA without data": (TWO_HOSTS.replace('data = "10.1.0.2"', ""), "hosts.beta.data: give the"),
    "three ranks": (
        TWO_HOSTS.replace("[[0, 1]]", "[[0, 1, 2]]").replace("[2, 3]", "[3]"),
        "hosts.alpha.attention: 3 ranks cannot share the model's 4 attention heads",
    ),
    "name of the secrets": (SMALL.replace("hosts.b", "hosts.secrets"), "hosts.secrets: the direc"),
    "idle host": (SMALL + '[hosts.c]\ncontrol = "10.0.0.3"\n', "hosts.c: nothing runs there"),
    "two Redis": (
        SMALL.replace("expert", 'services = ["redis"]\nexpert').replace(
            "attention", 'services = ["redis", "scheduler", "gateway"]\nattention'
        ),
        "services: redis must be on exactly one host, got 2",
    ),
    "no gateway": (
        SMALL.replace("attention", 'services = ["redis", "scheduler"]\nattention'),
        "services: gateway is on no host",
    ),
    "unknown service": (
        SMALL.replace("attention", 'services = ["gatway"]\nattention'),
        r"hosts.a.services\[0\]|hosts.a.services: invalid enum value 'gatway'",
    ),
    "no attention": (SMALL.replace("attention = 1", ""), "attention: no host has an attention wor"),
    "edge and experts": (
        SMALL.replace("attention = 1", "edge_agent = 1"),
        "edge_agent: edge agent",
    ),
    "few slots": (
        SMALL.replace("threads = 2", "threads = 2, slots_per_layer = 3"),
        "settings.slots_per_layer: 2 expert workers have 6 slots for 8 experts of a layer; give 4",
    ),
    "threads": (SMALL.replace("{threads = 2}", "{}"), "hosts.b.settings.threads: 2 workers share"),
    "misspelt setting": (
        SMALL.replace("threads", "treads"),
        "unknown setting, did you mean threads",
    ),
    "bad value": (
        SMALL.replace("threads = 2", "threads = -2"),
        "hosts.b: expert: --threads .*got '-2'",
    ),
    "own setting": (SMALL.replace("threads", "data_port"), "settings.data_port: this command sets"),
    "secret": (SMALL.replace("threads = 2", 'secret = "x"'), "settings.secret: secrets are files"),
    "bad publish": ('publish = "8000"\n' + SMALL, "publish: must be an IP address and a port"),
    "taken port": ('publish = "0.0.0.0:7010"\n' + SMALL, "publish: port 7010 of host a is that of"),
    "no model": (SMALL.replace("MODEL", "/nowhere"), "model: /nowhere has no config.json on this"),
    "long context": (
        "settings = {max_model_len = 9999}\n" + SMALL,
        "model: --max-model-len: 9999 tokens are more than the model's 128",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named_with_its_fix_and_nothing_is_written(
    tmp_path: Path, model: Path, kind: str
) -> None:
    description, complaint = WRONG[kind]
    if kind.startswith("no memory"):
        (model / "config.json").write_text(json.dumps(LARGE))

    said = refusal(tmp_path, description)

    assert re.search(complaint, said), said


def test_several_mistakes_are_told_at_once(tmp_path: Path, model: Path) -> None:
    said = refusal(tmp_path, SMALL.replace("10.0.0.1", "a b").replace("10.0.0.2", "0.0.0.0"))

    assert len(said.splitlines()) == 2


def test_a_broken_model_is_named(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text("{")

    assert "model: " in refusal(tmp_path, SMALL)


@pytest.mark.skipif(not compose_is_there(), reason="needs docker compose, to read the files")
def test_docker_compose_accepts_the_files(tmp_path: Path, model: Path) -> None:
    """The command itself lets compose read them."""
    for description in (TWO_HOSTS, SMALL, SHARED):
        shutil.rmtree(tmp_path / "cluster", ignore_errors=True)
        written(tmp_path, description)


def test_the_command_tells_what_runs_where_and_which_images_are_needed(
    ask: Run, house: Path
) -> None:
    (house / "hosts.toml").write_text(SMALL.replace("MODEL", str(house / "model")))

    done = ask("deploy", "compose", "--output", "out")

    assert done.returncode == 0, done.stderr
    assert "expert-1" in done.stdout
    assert "out/b/b.yaml: needs the images moesaic-expert:dev" in done.stdout
    assert "docker compose -f HOST.yaml up -d" in done.stderr
    as_json = json.loads(ask("deploy", "compose", "--output", "out", "--json").stdout)
    assert [*as_json] == ["a", "b"]
    missing = ask("deploy", "compose", "--hosts", "none.toml")
    assert (missing.returncode, "--hosts none.toml" in missing.stderr) == (Exit.USAGE, True)
