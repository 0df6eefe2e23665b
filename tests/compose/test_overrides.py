"""The overrides for GPUs and certificates, as compose reads them together with compose.yaml."""

import json
from typing import Any

import pytest

from tests.compose.containers import docker

GPU = ("compose.gpu.yaml",)
TLS = ("compose.tls.yaml",)
WORKERS = {
    "disaggregated": ("attention", "expert"),
    "local": ("attention-local",),
    "edge": ("edge-agent",),
}


def config(overrides: tuple[str, ...], profile: str, env: dict[str, str]) -> dict[str, Any]:
    """The services that compose would run."""
    shown = docker("compose", *_files(overrides, profile), "config", "--format", "json", env=env)
    return dict(json.loads(shown)["services"])


def _files(overrides: tuple[str, ...], profile: str) -> list[str]:
    files = [part for file in ("compose.yaml", *overrides) for part in ("-f", file)]
    return [*files, "--profile", profile]


@pytest.mark.parametrize("profile", WORKERS)
@pytest.mark.parametrize("overrides", [(), GPU, TLS, GPU + TLS], ids="+".join)
def test_compose_accepts_every_combination_without_a_warning(
    overrides: tuple[str, ...], profile: str
) -> None:
    files = _files(overrides, profile)

    assert docker("compose", *files, "config", "-q", check=False) == ""


@pytest.mark.parametrize("profile", WORKERS)
def test_each_worker_computes_on_its_own_gpu_and_can_reach_the_memory_of_all(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOESAIC_TORCH_INDEX", raising=False)
    chosen = {"MOESAIC_ATTENTION_GPU": "2", "MOESAIC_EXPERT_GPU": "1", "MOESAIC_AGENT_GPU": "3"}
    shown = config(GPU, profile, chosen)

    for name in WORKERS[profile]:
        worker = shown[name]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"]) == ("nvidia", -1)
        assert worker["ipc"] == "host"
        number = {"expert": "1", "edge-agent": "3"}.get(name, "2")
        assert worker["environment"]["MOESAIC_DEVICE"] == f"cuda:{number}"
        assert worker["environment"]["MOESAIC_DTYPE"] == "bfloat16"
        assert worker["build"]["args"]["TORCH_INDEX"] == ""
        assert worker["image"].endswith("-cuda")
    others = {name: each for name, each in shown.items() if name not in WORKERS[profile]}
    assert not any({"deploy", "ipc"} & set(each) for each in others.values())
