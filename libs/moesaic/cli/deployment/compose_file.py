"""The compose file of one host: its services with nothing left to fill in; pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from moesaic.cli.deployment.hosts import HostsFile
from moesaic.cli.deployment.services import HostService

REDIS_PORT = 6379
# Names of files of secrets by role, as services look for them.
SECRETS = {
    "redis": {"redis_users": "redis_users"},
    "scheduler": {},
    "gateway": {"block_secret": "moesaic_block_secret", "api_key": "moesaic_api_key"},
    "attention": {"block_secret": "moesaic_block_secret"},
    "expert": {},
    "edge-agent": {"block_secret": "moesaic_block_secret"},
}
# All services have less than one of compose.yaml's own: a test compares them.
EVERY = {
    "init": True,
    "restart": "unless-stopped",
    "user": "10001:10001",
    "read_only": True,
    "tmpfs": ["/tmp:size=64m,mode=1777"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "3"}},
    "network_mode": "host",
}
# Workers of a host share its PID namespace, and processes of one user can read each other's secrets there. So services
# that compute nothing run as another user.
LEADING_USER = "10002:10002"
KERNELS = "/var/cache/moesaic"  # of Triton's kernels; a volume for each role


def secrets_of(service: HostService) -> dict[str, str]:
    """Give the secrets of a service: the file, and its name in the container."""
    if service.role == "redis":
        return SECRETS["redis"]
    own = {f"redis_url_{service.role}": "moesaic_redis_url", "cluster_secret": "moesaic_secret"}
    return own | SECRETS[service.role]


def compose_of(cluster: HostsFile, name: str, services: list[HostService]) -> dict[str, Any]:
    """Make the contents of a host's compose file.

    Args:
        cluster: checked.
        name: of the host.
        services: of that host.
    """
    secrets = sorted({file for service in services for file in secrets_of(service)})
    volumes: dict[str, Any] = {
        volume: {} for service in services for volume in _volumes(cluster, service)[1]
    }
    made: dict[str, Any] = {"name": "moesaic"}
    made["services"] = {each.name: _service(cluster, name, each, services) for each in services}
    made["secrets"] = {file: {"file": f"./secrets/{file}"} for file in secrets}
    if any(each.role == "redis" for each in services):
        made["configs"] = {"redis_conf": {"file": "./redis.conf"}}
    return made | ({"volumes": volumes} if volumes else {})


def _service(
    cluster: HostsFile, host: str, service: HostService, services: list[HostService]
) -> dict[str, Any]:
    if service.role == "redis":
        return _redis(cluster, host)
    made: dict[str, Any] = {"image": _image(cluster, host, service)}
    if cluster.source:
        made["build"] = _build(cluster, host, service)
    made |= EVERY | {"stop_grace_period": f"{float(service.settings.get('grace_s', 30)) + 15:g}s"}
    made["environment"] = service.environment | _beside_settings(cluster, host, service)
    made["secrets"] = _secrets(service)
    if volumes := _volumes(cluster, service)[0]:
        made["volumes"] = volumes
    if not service.worker:
        return made | {"user": LEADING_USER}
    return made | _of_a_worker(cluster, host, service, services)


def _redis(cluster: HostsFile, host: str) -> dict[str, Any]:
    address = cluster.hosts[host].control
    return {
        "image": "redis:8",
        **EVERY,
        "user": "redis",
        "command": ["redis-server", "/etc/redis/moesaic.conf", "--bind", "127.0.0.1", address],
        "stop_grace_period": "10s",
        "configs": [{"source": "redis_conf", "target": "/etc/redis/moesaic.conf"}],
        "secrets": ["redis_users"],
        "volumes": ["redis:/data"],
        "healthcheck": {
            "test": [
                "CMD-SHELL",
                "redis-cli --user health --pass - --no-auth-warning ping | grep -q PONG",
            ],
            "interval": "10s",
            "timeout": "3s",
            "start_period": "30s",
            "start_interval": "500ms",
        },
    }


def _of_a_worker(
    cluster: HostsFile, host: str, service: HostService, services: list[HostService]
) -> dict[str, Any]:
    """Give what lets workers of a host exchange tensors without a network, and their devices."""
    made: dict[str, Any] = {}
    if sum(each.worker for each in services) > 1:
        # Rings in shared memory need both namespaces, CUDA IPC the first.
        made |= {"ipc": "host", "pid": "host", "init": False}
    elif service.gpus:
        # A limit, no reservation: ranks share memory in /dev/shm, and 64 MB is too little.
        made["shm_size"] = "8gb"
    if service.gpus:
        ids = [str(gpu) for gpu in cluster.hosts[host].gpus]
        gpus = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        made["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    if cluster.hosts[host].rdma:
        made["devices"] = ["/dev/infiniband:/dev/infiniband"]
        # RDMA pins its memory. The limit allows it; the capability allows it only to root.
        made |= {"cap_add": ["IPC_LOCK"], "ulimits": {"memlock": {"soft": -1, "hard": -1}}}
    return made


def _beside_settings(cluster: HostsFile, host: str, service: HostService) -> dict[str, str]:
    """Give the variables of libraries."""
    if not service.worker:
        return {}
    made = {}
    if threads := service.environment.get("MOESAIC_THREADS"):
        made["OMP_NUM_THREADS"] = threads
    if service.gpus:
        made["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
        # As nvidia-smi counts.
        made["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    elif sum(not gpus for _, gpus in cluster.hosts[host].workers) > 1:
        # Threads that spin while they wait would take the cores from those that work.
        made["OMP_WAIT_POLICY"] = "passive"
    if cluster.hosts[host].rdma:
        made["UCX_NET_DEVICES"] = cluster.hosts[host].rdma
    return made


def _secrets(service: HostService) -> list[dict[str, str]]:
    return [{"source": file, "target": target} for file, target in secrets_of(service).items()]


def _volumes(cluster: HostsFile, service: HostService) -> tuple[list[Any], list[str]]:
    """Give the mounts of a service, and the volumes among them."""
    if service.role == "redis":
        return ["redis:/data"], ["redis"]
    if service.role == "scheduler":
        return [], []
    model = {
        "type": "bind",
        "source": cluster.hosts[service.host].model or cluster.model,
        "target": "/model",
        "read_only": True,
        # A missing directory is an error.
        "bind": {"create_host_path": False},
    }
    if not service.gpus:
        return [model], []
    volume = f"{service.role}-kernels"
    return [model, f"{volume}:{KERNELS}"], [volume]


def _image(cluster: HostsFile, host: str, service: HostService) -> str:
    extras = _extras(cluster, host) if service.worker else []
    return f"{cluster.images}moesaic-{service.role}:{'-'.join([cluster.tag, *extras])}"


def _extras(cluster: HostsFile, host: str) -> list[str]:
    """List the extras of a worker's image."""
    found = cluster.hosts[host]
    return ["cuda"] * bool(found.gpus) + ["rdma"] * bool(found.rdma)


def _build(cluster: HostsFile, host: str, service: HostService) -> dict[str, Any]:
    made: dict[str, Any] = {
        "context": cluster.source,
        "dockerfile": "deploy/Dockerfile",
        "target": service.role,
    }
    if service.worker:
        extras = _extras(cluster, host)
        # PyPI's builds of torch are for CUDA.
        index = "" if "cuda" in extras else "https://download.pytorch.org/whl/cpu"
        made["args"] = {"TORCH_INDEX": index, "EXTRAS": ",".join(extras)}
    return made


def images_of(compose: Mapping[str, Any]) -> list[str]:
    """List the images that a compose file names."""
    return sorted({service["image"] for service in compose["services"].values()})


def as_yaml(contents: Mapping[str, Any]) -> str:
    """Write maps and lists of texts, numbers and switches as YAML; ``$`` stands for itself in compose."""
    return "".join(f"{line}\n" for line in _lines(contents))


def _lines(value: Any) -> Iterator[str]:
    """Write the lines of a value that is no scalar."""
    items = value.items() if isinstance(value, Mapping) else ((None, each) for each in value)
    for key, each in items:
        head = "-" if key is None else f"{key}:"
        if not isinstance(each, Mapping | list) or not each:
            yield f"{head} {_scalar(each)}"
        elif key is None:
            first, *others = _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        else:
            yield head
            yield from (f"  {line}" for line in _lines(each))


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")
