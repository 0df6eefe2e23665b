"""The chart, rendered by Helm itself: the manifests of the kustomization with values put in."""

import json
import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import kubernetes_validate
import pytest
import yaml

import moesaic
from tests.deploy.test_kubernetes import OURS, VERSIONS, WORKERS, manifests
from tests.suites import ROOT

pytestmark = pytest.mark.skipif(not find_spec("helm_python"), reason="needs helm-python-sdk")

CHART = ROOT / "deploy" / "helm" / "moesaic"
# In a process of its own: Helm is a library of Go, which takes over signals and threads.
HELM = """
import json, sys
from helm_python.chart import Chart, lint
chart, values = sys.argv[1], json.loads(sys.argv[2])
loaded = Chart.load(chart)
loaded.validate_schema(values)
rendered = loaded.render(values, name="tried", namespace="llm")
print(json.dumps([rendered, lint(chart, values, strict=True)]))
"""
Manifest = dict[str, Any]


def helm(**values: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", HELM, str(CHART), json.dumps(values)],
        capture_output=True,
        text=True,
    )


def rendered(**values: Any) -> dict[tuple[str, str], Manifest]:
    """The manifests that Helm makes, by kind and name."""
    done = helm(**values)
    assert done.returncode == 0, done.stderr
    texts, report = json.loads(done.stdout)
    assert report["errors"] == []
    found = [m for text in texts.values() for m in yaml.safe_load_all(text) if m]
    named = {(m["kind"], m["metadata"]["name"]): m for m in found}
    assert len(named) == len(found)
    return named


def pod_of(found: dict[tuple[str, str], Manifest], role: str) -> Manifest:
    return dict(found["Deployment", role]["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def usual() -> dict[tuple[str, str], Manifest]:
    """The chart with its own values."""
    return rendered()


@pytest.fixture(scope="module")
def changed() -> dict[tuple[str, str], Manifest]:
    """The chart with other values than its own, wherever there are some."""
    return rendered(
        image={"registry": "registry.example.com", "tag": "9"},
        secretName="theirs",
        settings={"MOESAIC_SLOTS_PER_LAYER": "16"},
        model={"existingClaim": "weights"},
        gpu={"enabled": True},
        expert={"replicas": 5, "nodeSelector": {"gpu": "h200"}},
        redis={"image": "valkey:9", "size": "7Gi", "storageClass": "fast"},
    )


@pytest.fixture(scope="module")
def large() -> dict[tuple[str, str], Manifest]:
    """The chart for several gateways and another kind of GPU, with limits and places of its own."""
    limited = {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "16Gi"}}
    toleration = {"key": "pool", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}
    return rendered(
        gateway={"replicas": 3, "tolerations": [toleration]},
        attention={"replicas": 4, "resources": limited},
        expert={"replicas": 16, "resources": limited, "tolerations": [toleration]},
        model={"size": "2Ti", "storageClass": "shared-files"},
        gpu={"enabled": True, "resource": "amd.com/gpu", "kernelsSize": "4Gi"},
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", ["usual", "changed", "large"])
def test_what_helm_renders_has_the_schema_of_kubernetes(
    version: str, values: str, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue(values).values():
        kubernetes_validate.validate(found, version, strict=True)


def test_limits_and_places_of_a_worker_stay_beside_its_gpu(
    large: dict[tuple[str, str], Manifest],
) -> None:
    pod = pod_of(large, "expert")

    assert pod["containers"][0]["resources"]["limits"] == {"memory": "16Gi", "amd.com/gpu": 1}
    assert [each["key"] for each in pod["tolerations"]] == ["pool", "amd.com/gpu"]
    claim = large["PersistentVolumeClaim", "expert-kernels"]["spec"]
    assert claim["storageClassName"] == "shared-files"
    assert claim["resources"]["requests"]["storage"] == "4Gi"


def test_the_chart_has_the_manifests_of_the_kustomization(
    usual: dict[tuple[str, str], Manifest],
) -> None:
    ours = {(m["kind"], m["metadata"]["name"]): m for m in manifests()}
    made = {("Namespace", "moesaic")}  # helm install --create-namespace makes it

    assert set(usual) == (set(ours) - made) | {("ConfigMap", "settings"), ("ConfigMap", "redis")}
    for key in set(ours) - made:
        found, before = deepcopy(usual[key]), ours[key]
        del found["metadata"]["labels"]
        if key[0] == "Deployment":
            template = found["spec"]["template"]
            del template["metadata"]["annotations"]
            template["spec"]["containers"][0]["image"] = f"moesaic-{key[1]}"
        assert found == before


def test_values_reach_every_place_that_they_are_for(
    changed: dict[tuple[str, str], Manifest],
) -> None:
    assert ("PersistentVolumeClaim", "model") not in changed
    assert changed["ConfigMap", "settings"]["data"]["MOESAIC_SLOTS_PER_LAYER"] == "16"
    assert changed["ConfigMap", "settings"]["data"]["MOESAIC_DEVICE"] == "cuda"
    assert changed["Deployment", "expert"]["spec"]["replicas"] == 5
    for role in OURS:
        pod = pod_of(changed, role)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert container["image"] == f"registry.example.com/moesaic-{role}:9"
        assert volumes["secrets"]["secret"]["secretName"] == "theirs"
        assert role == "scheduler" or (
            volumes["model"]["persistentVolumeClaim"]["claimName"] == "weights"
        )
        limits = container["resources"].get("limits", {})
        assert limits == ({"nvidia.com/gpu": 1} if role in WORKERS else {})
        if role in WORKERS:
            claim = volumes["kernels"]["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in changed
            assert volumes["shm"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert pod_of(changed, "expert")["nodeSelector"] == {"gpu": "h200"}
    redis = changed["StatefulSet", "redis"]["spec"]
    (claim,) = redis["volumeClaimTemplates"]
    assert redis["template"]["spec"]["containers"][0]["image"] == "valkey:9"
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    assert claim["spec"]["storageClassName"] == "fast"


def test_changed_settings_restart_pods(usual: dict[tuple[str, str], Manifest]) -> None:
    def digest(found: dict[tuple[str, str], Manifest]) -> str:
        metadata = found["Deployment", "gateway"]["spec"]["template"]["metadata"]
        return str(metadata["annotations"]["checksum/settings"])

    before = digest(rendered())
    assert digest(rendered()) == before
    assert digest(rendered(settings={"MOESAIC_LOG_LEVEL": "debug"})) != before


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"experts": {"replicas": 3}}, "experts"),
        ({"expert": {"replicas": "3"}}, "replicas"),
        ({"expert": {"replicas": -1}}, "replicas"),
        ({"settings": {"MOESAIC_SLOTS_PER_LAYER": 16}}, "MOESAIC_SLOTS_PER_LAYER"),
        ({"settings": {"slots-per-layer": "16"}}, "slots-per-layer"),
        ({"model": {"size": "200"}}, "size"),
        ({"gpu": {"enabled": "yes"}}, "enabled"),
        ({"image": {"registry": "registry.example.com/"}}, "registry"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    done = helm(**values)

    assert done.returncode != 0
    assert named in done.stderr


def test_the_chart_is_of_the_version_of_the_product() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    assert {chart["version"], chart["appVersion"], values["image"]["tag"]} == {moesaic.__version__}
