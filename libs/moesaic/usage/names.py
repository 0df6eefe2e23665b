"""All ``MOESAIC_*`` variables that any of our programs reads; another name is misspelt.

One environment may serve several services, commands and containers, so each knows the names of all.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from moesaic.usage.nearest import proposal
from moesaic.usage.variables import ENV_PREFIX

# Settings of services; each is a field of a model in services/*/settings.py.
SETTINGS = frozenset(
    {
        "MOESAIC_ACTIVATION_WINDOW_S",
        "MOESAIC_ADMIN_PORT",
        "MOESAIC_ADVERTISE_HOST",
        "MOESAIC_ALLOWED_HOSTS",
        "MOESAIC_API_KEY",
        "MOESAIC_API_KEYS_FILE",
        "MOESAIC_BATCH_MAX_INFLIGHT",
        "MOESAIC_BLOCK_SECRET",
        "MOESAIC_BROWNOUT",
        "MOESAIC_CACHE_BYTES",
        "MOESAIC_CLOCK_SKEW_S",
        "MOESAIC_CLUSTER",
        "MOESAIC_CONTROL_HOST",
        "MOESAIC_CONTROL_TOKENS_IN_CONTENT",
        "MOESAIC_DATA_HOST",
        "MOESAIC_DATA_PORT",
        "MOESAIC_DECODE_GRAPH_TOKENS",
        "MOESAIC_DETERMINISTIC",
        "MOESAIC_DEVICE",
        "MOESAIC_DISPATCH",
        "MOESAIC_DTYPE",
        "MOESAIC_ENABLE_PREFIX_CACHING",
        "MOESAIC_EXCHANGE",
        "MOESAIC_EXPERT_MEMORY_BYTES",
        "MOESAIC_EXPERT_SCHEDULING",
        "MOESAIC_EXPERT_TIMEOUT_S",
        "MOESAIC_FILES_DIR",
        "MOESAIC_FILES_KEEP_DAYS",
        "MOESAIC_FILES_QUOTA_BYTES",
        "MOESAIC_GATHER_WINDOW",
        "MOESAIC_GENERATION_CONFIG",
        "MOESAIC_GRACE_S",
        "MOESAIC_HOST",
        "MOESAIC_KEEP_ALIVE_S",
        "MOESAIC_KEEP_HEAD",
        "MOESAIC_KV_BLOCKS",
        "MOESAIC_KV_MEMORY_BYTES",
        "MOESAIC_KV_MEMORY_FRACTION",
        "MOESAIC_LOAD_SHARE",
        "MOESAIC_LOG_LEVEL",
        "MOESAIC_MAX_BODY_BYTES",
        "MOESAIC_MAX_EXPERT_BYTES",
        "MOESAIC_MAX_INFLIGHT",
        "MOESAIC_MAX_MODEL_LEN",
        "MOESAIC_MAX_NUM_BATCHED_TOKENS",
        "MOESAIC_MAX_NUM_QUEUED_REQS",
        "MOESAIC_MAX_NUM_QUEUED_TOKENS",
        "MOESAIC_MAX_NUM_SEQS",
        "MOESAIC_MEMORY_BYTES",
        "MOESAIC_METRICS_PORT",
        "MOESAIC_MICRO_BATCHES",
        "MOESAIC_MIN_EPOCH_INTERVAL_S",
        "MOESAIC_MODEL",
        "MOESAIC_NODE",
        "MOESAIC_NO_AUTH",
        "MOESAIC_OFFLOAD",
        "MOESAIC_OFFLOAD_DIR",
        "MOESAIC_PLACEMENT_POLICY",
        "MOESAIC_PORT",
        "MOESAIC_PRIVATE_NETWORK",
        "MOESAIC_PREPARE_TIMEOUT_S",
        "MOESAIC_PROFILE_INTERVAL_S",
        "MOESAIC_QUANTIZATION",
        "MOESAIC_READ_FILES",
        "MOESAIC_REASONING_PARSER",
        "MOESAIC_RECOVERY_S",
        "MOESAIC_REDIS_URL",
        "MOESAIC_REPLAN_GAIN",
        "MOESAIC_REPLAN_INTERVAL_S",
        "MOESAIC_REQUEST_TIMEOUT_S",
        "MOESAIC_ROUTER_CONSOLIDATE",
        "MOESAIC_ROUTER_MAX_BLOCKS",
        "MOESAIC_ROUTER_MAX_QUEUED",
        "MOESAIC_ROUTER_MAX_WAIT_S",
        "MOESAIC_ROUTER_POLICY",
        "MOESAIC_ROUTER_SATURATION_FLOPS",
        "MOESAIC_SCALING",
        "MOESAIC_SCALING_ACTUATOR",
        "MOESAIC_SCALING_COMPOSE_PROJECT",
        "MOESAIC_SCALING_COMPOSE_SOCKET",
        "MOESAIC_SCALING_COOL_DOWN_S",
        "MOESAIC_SCALING_INTERVAL_S",
        "MOESAIC_SCALING_KUBERNETES_ATTENTION",
        "MOESAIC_SCALING_KUBERNETES_EXPERTS",
        "MOESAIC_SCALING_KUBERNETES_NAMESPACE",
        "MOESAIC_SCALING_MAX_ATTENTION",
        "MOESAIC_SCALING_MAX_EXPERTS",
        "MOESAIC_SECRET",
        "MOESAIC_SERVED_MODEL_NAME",
        "MOESAIC_SETTLE_S",
        "MOESAIC_SHARE",
        "MOESAIC_SITE",
        "MOESAIC_SLOTS_PER_LAYER",
        "MOESAIC_STANDBY",
        "MOESAIC_STEP_TARGET_S",
        "MOESAIC_STORE_SCORING_KV",
        "MOESAIC_STREAM_IDLE_S",
        "MOESAIC_SWEEP_BYTES",
        "MOESAIC_TENSOR_PARALLEL",
        "MOESAIC_TENSOR_PARALLEL_ADDRESS",
        "MOESAIC_TENSOR_PARALLEL_RANK",
        "MOESAIC_THREADS",
        "MOESAIC_TLS_CA",
        "MOESAIC_TLS_CERT",
        "MOESAIC_TLS_KEY",
        "MOESAIC_TLS_NAME",
        "MOESAIC_TOOL_CALL_PARSER",
        "MOESAIC_TRANSPORTS",
        "MOESAIC_WARM_UP_ROWS",
        "MOESAIC_WEIGHTS_PORT",
        "MOESAIC_WIRE_DTYPE",
        "MOESAIC_WORKER_ID",
    }
)
# Read by the moesaic command, and by readers of files of secrets.
COMMANDS = frozenset(
    {
        "MOESAIC_AGENTS",
        "MOESAIC_ATTENTION",
        "MOESAIC_DEVICES",
        "MOESAIC_EXPERTS",
        "MOESAIC_LINK",
        "MOESAIC_MEMORY",
        "MOESAIC_MEMORY_FRACTION",
        "MOESAIC_SCHEDULER",
        "MOESAIC_SECRETS_DIR",
        "MOESAIC_STANDBY_ATTENTION",
        "MOESAIC_STANDBY_EXPERTS",
        "MOESAIC_TOPOLOGY",
        "MOESAIC_URL",
    }
)
# Read by every process that computes on a CPU.
KERNELS = frozenset({"MOESAIC_KERNELS"})
# Read by compose*.yaml, from the environment or from a file .env.
COMPOSE = frozenset(
    {
        "MOESAIC_AGENT_GPU",
        "MOESAIC_AGENT_NUMBER",
        "MOESAIC_ATTENTION_GPU",
        "MOESAIC_ATTENTION_NUMBER",
        "MOESAIC_EXPERT_GPU",
        "MOESAIC_EXPERT_NUMBER",
        "MOESAIC_PUBLISH",
        "MOESAIC_RDMA_IMAGE",
        "MOESAIC_REDIS_HOST",
        "MOESAIC_REDIS_IMAGE",
        "MOESAIC_STOP_GRACE_PERIOD",
        "MOESAIC_TAG",
        "MOESAIC_TORCH_INDEX",
    }
)
# Read by tests and benchmarks.
DEVELOPMENT = frozenset(
    {
        "MOESAIC_BENCH_LARGE",
        "MOESAIC_BENCH_LAYERS",
        "MOESAIC_BENCH_LLAMA_CPP",
        "MOESAIC_BENCH_VLLM",
        "MOESAIC_COMMAND",
        "MOESAIC_TEST_ENGINE",
    }
)
VARIABLES = SETTINGS | COMMANDS | KERNELS | COMPOSE | DEVELOPMENT

# Variables that Kubernetes, and Docker's links, set for a service named moesaic-something.
_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?$"
)


def unknown_variables(
    environment: Mapping[str, str], more: Collection[str] = frozenset()
) -> list[str]:
    """Write one line for each ``MOESAIC_*`` variable with a value that no program reads.

    Args:
        environment: variables by name; upper and lower case are the same.
        more: known names besides ``VARIABLES``.
    """
    known = VARIABLES | frozenset(more)
    given = sorted(name for name, value in environment.items() if value and _is_ours(name))
    return [
        f"{name}: there is no such variable{proposal(name.upper(), known)}"
        for name in given
        if name.upper() not in known and not _is_link(name.upper(), environment[name])
    ]


def unknown_files(directory: Path, more: Collection[str] = frozenset()) -> list[str]:
    """Write the same for files of secrets, named like variables in lower case."""
    known = {name.lower() for name in VARIABLES | frozenset(more)}
    return [
        f"{directory / name}: there is no such setting{proposal(name.lower(), known)}"
        for name in _ours_in(directory)
        if name.lower() not in known
    ]


def _is_ours(name: str) -> bool:
    return name.upper().startswith(ENV_PREFIX)


def _ours_in(directory: Path) -> Iterator[str]:
    return iter(sorted(file.name for file in directory.iterdir() if _is_ours(file.name)))


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)
