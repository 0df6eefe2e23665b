"""The overrides for GPUs and RDMA, as compose reads them together with compose.yaml."""

import json
from typing import Any

import pytest

from tests.compose.containers import docker

ADDRESSES = {
    "MOESAIC_CONTROL_HOST": "10.0.0.11",
    "MOESAIC_DATA_HOST": "10.1.0.11",
    "MOESAIC_REDIS_HOST": "10.0.0.10",
}
GPU = ("compose.gpu.yaml",)
IB = ("compose.ib.yaml",)
GPU_AND_IB = GPU + IB
WORKERS = {"disaggregated": ("attention", "expert"), "local": ("attention-local",)}


def config(overrides: tuple[str, ...], profile: str, env: dict[str, str]) -> dict[str, Any]:
    """The services that compose would run."""
    shown = docker("compose", *_files(overrides, profile), "config", "--format", "json", env=env)
    return dict(json.loads(shown)["services"])


def refusal(overrides: tuple[str, ...], env: dict[str, str]) -> str:
    """Return the complaint of compose."""
    files = _files(overrides, "disaggregated")
    return docker("compose", *files, "config", "-q", env=env, check=False)


def _files(overrides: tuple[str, ...], profile: str) -> list[str]:
    files = [part for file in ("compose.yaml", *overrides) for part in ("-f", file)]
    return [*files, "--profile", profile]


@pytest.mark.parametrize("profile", WORKERS)
@pytest.mark.parametrize("overrides", [(), GPU, IB, GPU_AND_IB], ids="+".join)
def test_compose_accepts_every_combination_without_a_warning(
    overrides: tuple[str, ...], profile: str
) -> None:
    files = _files(overrides, profile)

    assert docker("compose", *files, "config", "-q", env=ADDRESSES, check=False) == ""


@pytest.mark.parametrize("missing", ADDRESSES)
@pytest.mark.parametrize("overrides", [IB, GPU_AND_IB], ids="+".join)
def test_a_missing_address_is_named(overrides: tuple[str, ...], missing: str) -> None:
    said = refusal(overrides, ADDRESSES | {missing: ""})

    assert missing in said
    assert "address" in said
    assert not any(other in said for other in ADDRESSES if other != missing)


@pytest.mark.parametrize("profile", WORKERS)
@pytest.mark.parametrize("overrides", [GPU, GPU_AND_IB], ids="+".join)
def test_each_worker_gets_the_gpu_that_is_chosen_for_it(
    overrides: tuple[str, ...], profile: str
) -> None:
    chosen = {"MOESAIC_ATTENTION_GPU": "2", "MOESAIC_EXPERT_GPU": "GPU-5c1a"}
    shown = config(overrides, profile, ADDRESSES | chosen)

    for name in WORKERS[profile]:
        worker = shown[name]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["device_ids"] == ["GPU-5c1a" if name == "expert" else "2"]
        assert worker["environment"]["MOESAIC_DEVICE"] == "cuda"
        assert worker["environment"]["MOESAIC_DTYPE"] == "bfloat16"
        assert worker["build"]["args"]["TORCH_INDEX"] == ""
        assert worker["image"].endswith("-cuda")
    assert not any("deploy" in s for n, s in shown.items() if n not in WORKERS[profile])


@pytest.mark.parametrize("profile", WORKERS)
@pytest.mark.parametrize("overrides", [IB, GPU_AND_IB], ids="+".join)
def test_over_rdma_everything_is_on_the_host_and_nothing_starts_what_was_not_named(
    overrides: tuple[str, ...], profile: str
) -> None:
    shown = config(overrides, profile, ADDRESSES)

    assert set(shown) == {"redis", "scheduler", "gateway", *WORKERS[profile]}
    for name, service in shown.items():
        assert service["network_mode"] == "host"
        assert not {"networks", "ports", "depends_on"} & set(service)
        if name != "redis":
            assert service["extra_hosts"] == ["redis=10.0.0.10"]
            assert service["environment"]["MOESAIC_CONTROL_HOST"] == "10.0.0.11"
    assert shown["redis"]["command"][-3:] == ["--bind", "127.0.0.1", "10.0.0.10"]
    assert shown["gateway"]["environment"]["MOESAIC_HOST"] == "127.0.0.1"


def test_expert_workers_of_one_host_are_told_apart_by_their_numbers() -> None:
    first, second = (
        config(IB, "disaggregated", ADDRESSES | {"MOESAIC_EXPERT_NUMBER": number})["expert"]
        for number in ("20", "21")
    )

    different = {
        name: value
        for name, value in second["environment"].items()
        if value != first["environment"][name]
    }
    assert different == {
        "MOESAIC_WORKER_ID": "expert-{host}-21",
        "MOESAIC_ADMIN_PORT": "7021",
        "MOESAIC_DATA_PORT": "7121",
        "MOESAIC_METRICS_PORT": "9021",
        "MOESAIC_WEIGHTS_PORT": "7221",
    }
    assert first["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert second["scale"] == 1
