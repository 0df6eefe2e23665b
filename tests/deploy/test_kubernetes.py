"""What the manifests promise: they have the schema of Kubernetes, and agree with compose and settings."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from moesaic.services.scheduler.scaling.actuators.kubernetes import DEPLOYMENTS
from moesaic.usage.names import settings
from tests.deploy.test_files import (
    SETTINGS,
    given_as_secrets,
    instructions,
    read,
    services,
    variable,
)
from tests.suites import ROOT

DEPLOY = ROOT / "deploy"
VERSIONS = ("1.30", "1.33", "1.37")
WORKERS = ("attention", "expert")
OURS = ("scheduler", "gateway", *WORKERS)

Manifest = dict[str, Any]


def kustomization(folder: Path = DEPLOY) -> Manifest:
    return dict(yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8")))


def manifests() -> Iterator[Manifest]:
    for file in kustomization()["resources"]:
        yield from yaml.safe_load_all((DEPLOY / file).read_text(encoding="utf-8"))


def manifest(kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> dict[str, Manifest]:
    """The specification of every pod, by the name of what makes it."""
    return {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]
        for m in manifests()
        if m["kind"] in ("Deployment", "StatefulSet")
    }


def container(name: str) -> Manifest:
    (found,) = pods()[name]["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """Variables of a service's container, empty where the cluster fills them in."""
    given = container(name).get("env", [])
    return {entry["name"]: entry.get("value", "") for entry in given}


def seen_secrets(name: str) -> dict[str, str]:
    """Names of files in a pod's directory of secrets, and what is in them."""
    (volume,) = [v for v in pods()[name]["volumes"] if v["name"] == "secrets"]
    return {item["path"]: item["key"] for item in volume["secret"]["items"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_has_the_schema_of_kubernetes(version: str) -> None:
    claims = yaml.safe_load_all((DEPLOY / "kubernetes/gpu/kernels.yaml").read_text())
    for found in (*manifests(), *claims):
        kubernetes_validate.validate(found, version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    wrong = manifest("Deployment", "expert")
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 45

    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_every_file_is_part_of_the_kustomization() -> None:
    files = {str(file.relative_to(DEPLOY)) for file in (DEPLOY / "kubernetes").glob("*.yaml")}

    assert set(kustomization()["resources"]) == files


# What compose.yaml has too


@pytest.mark.parametrize("name", OURS)
def test_variables_and_ports_are_those_of_compose(name: str) -> None:
    theirs = services("compose.yaml")[name]["environment"]
    ports = [key for key, value in theirs.items() if key.endswith("_PORT") and value]

    ours = environment(name)

    assert {key: ours[key] for key in ports} == {key: theirs[key] for key in ports}
    assert {key for key in ours if key.startswith("MOESAIC_")} - {"MOESAIC_SECRETS_DIR"} <= {
        variable(field) for field in SETTINGS[name].model_fields
    }
    opened = {str(port["containerPort"]) for port in container(name)["ports"]}
    assert opened == {theirs[key] for key in ports}


def test_the_console_is_on_the_loopback_of_a_gateway_for_port_forwarding() -> None:
    ours = environment("gateway")

    assert ours["MOESAIC_CONSOLE_PORT"] == "8080"
    assert SETTINGS["gateway"].model_fields["console_host"].default == "127.0.0.1"
    assert "MOESAIC_CONSOLE_HOST" not in ours
    page = (ROOT / "docs/operate/kubernetes.md").read_text(encoding="utf-8")
    assert "port-forward deployment/gateway 8080" in page


@pytest.mark.parametrize("name", ["redis", *OURS])
def test_a_pod_sees_the_secrets_that_its_container_has_in_compose(name: str) -> None:
    service = services("compose.yaml")[name]

    if name == "redis":
        assert seen_secrets(name) == {"redis_users": "redis_users"}
        return
    theirs = {secret["target"]: secret["source"] for secret in service["secrets"]}
    assert seen_secrets(name) == theirs
    assert {path.upper() for path in seen_secrets(name)} == given_as_secrets(service)


def test_all_secrets_that_pods_see_are_taken_from_where_they_are_made() -> None:
    (generator,) = kustomization()["secretGenerator"]
    made = {Path(source["file"]).name for source in read("compose.yaml")["secrets"].values()}

    taken = {Path(file).name for file in generator["files"]}

    assert all(Path(file).parent == Path("secrets") for file in generator["files"])
    assert {key for name in pods() for key in seen_secrets(name).values()} == taken
    assert taken == made - {"redis_url_edge-agent", "grafana_password"}


def test_settings_for_all_services_are_names_that_they_know() -> None:
    folders = [DEPLOY, DEPLOY / "kubernetes/gpu", DEPLOY / "kubernetes/scaling"]
    literals = [
        literal
        for folder in folders
        for generator in kustomization(folder)["configMapGenerator"]
        for literal in generator.get("literals", [])
    ]
    names = {literal.partition("=")[0] for literal in literals}

    assert {name for name in names if name.startswith("MOESAIC_")} <= settings()
    assert all(
        {"configMapRef": {"name": "settings"}} in container(name)["envFrom"] for name in OURS
    )


# What a pod may do, and for how long


@pytest.mark.parametrize("name", ["redis", *OURS])
def test_a_pod_can_do_no_more_than_it_must(name: str) -> None:
    pod = pods()[name]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == (999 if name == "redis" else 10001)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is (name == "scheduler")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not any("hostPath" in volume for volume in pod["volumes"])


def test_the_scheduler_may_scale_the_two_sides_and_nothing_else() -> None:
    (rule,) = manifest("Role", "scale-workers")["rules"]
    (subject,) = manifest("RoleBinding", "scale-workers")["subjects"]

    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": sorted(DEPLOYMENTS.values()),
        "verbs": ["get", "patch"],
    }
    assert subject == {"kind": "ServiceAccount", "name": pods()["scheduler"]["serviceAccountName"]}
    assert set(DEPLOYMENTS.values()) <= set(pods())


@pytest.mark.parametrize("name", OURS)
def test_a_pod_is_not_ended_before_its_service_has_finished(name: str) -> None:
    hook = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    before_s = float(hook[1]) if hook else 0.0
    grace_s = SETTINGS[name].model_fields["grace_s"].default

    assert pods()[name]["terminationGracePeriodSeconds"] > before_s + grace_s


@pytest.mark.parametrize("name", OURS)
def test_probes_ask_what_stays_true_for_liveness_and_what_is_so_now_for_readiness(
    name: str,
) -> None:
    found = container(name)

    if name == "gateway":
        assert found["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "rest"}
        assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "rest"}
    else:
        assert found["livenessProbe"]["tcpSocket"] == {"port": "grpc"}
        assert found["readinessProbe"]["grpc"] == {"port": 7000}


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_a_deployment_waits_as_long_for_the_first_load_as_a_container(name: str) -> None:
    (check,) = instructions("base", "HEALTHCHECK")

    deadline_s = manifest("Deployment", name)["spec"]["progressDeadlineSeconds"]

    assert f"--start-period={deadline_s // 60}m " in check


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_shared_memory_and_the_model_to_read(name: str) -> None:
    mounts = {mount["mountPath"]: mount for mount in container(name)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pods()[name]["volumes"]}

    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    assert mounts[environment(name)["MOESAIC_MODEL"]]["readOnly"] is True


@pytest.mark.parametrize("name", ["gateway", *WORKERS])
def test_nodes_are_emptied_one_pod_of_a_service_at_a_time(name: str) -> None:
    budget = manifest("PodDisruptionBudget", name)["spec"]
    labels = manifest("Deployment", name)["spec"]["template"]["metadata"]["labels"]

    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()


# What kubectl makes of all that


@pytest.fixture
def built(tmp_path: Path) -> list[Manifest]:
    """The manifests of a kustomization of one's own, with GPUs and scaling, in another namespace."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl, to build a kustomization")
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("secrets"))
    make = [sys.executable, str(tmp_path / "deploy/make_secrets.py")]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    mine = tmp_path / "mine"
    mine.mkdir()
    page = (ROOT / "docs/operate/kubernetes.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    (mine / "kustomization.yaml").write_text(example, encoding="utf-8")
    command = [kubectl, "kustomize", str(mine)]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_the_example_of_the_page_builds_what_kubernetes_accepts(built: list[Manifest]) -> None:
    for found in built:
        kubernetes_validate.validate(found, VERSIONS[-1], strict=True)


def test_a_kustomization_of_one_s_own_changes_what_the_page_says(built: list[Manifest]) -> None:
    by_name = {(m["kind"], m["metadata"]["name"].split("-")[0]): m for m in built}
    settings = by_name["ConfigMap", "settings"]["data"]

    assert {m["metadata"].get("namespace", "llm") for m in built} == {"llm"}
    assert settings["MOESAIC_SLOTS_PER_LAYER"] == "16"
    assert settings["MOESAIC_SCALING_ACTUATOR"] == "kubernetes"
    claims = {
        m["metadata"]["name"]: m["spec"] for m in built if m["kind"] == "PersistentVolumeClaim"
    }
    assert all(claim["storageClassName"] == "shared-files" for claim in claims.values())
    for name in WORKERS:
        spec = by_name["Deployment", name]["spec"]
        (worker,) = spec["template"]["spec"]["containers"]
        assert "replicas" not in spec
        assert worker["resources"]["limits"] == {"nvidia.com/gpu": 1}
        assert worker["image"].startswith("registry.example.com/moesaic-")
        (memory,) = [v for v in spec["template"]["spec"]["volumes"] if v["name"] == "shm"]
        assert memory["emptyDir"]["sizeLimit"] == "8Gi"
        # The directory that compose mounts a volume of this role at, too.
        (cache,) = services("compose.gpu.yaml")[name]["volumes"]
        volume, _, directory = cache.partition(":")
        (mount,) = [m for m in worker["volumeMounts"] if m["mountPath"] == directory]
        (kernels,) = [v for v in spec["template"]["spec"]["volumes"] if v["name"] == mount["name"]]
        assert kernels["persistentVolumeClaim"] == {"claimName": volume}
        assert volume in claims
