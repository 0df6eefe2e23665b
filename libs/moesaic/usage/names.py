"""All ``MOESAIC_*`` variables that any of our programs reads; another name is misspelt.

One environment may serve several services, commands and containers, so each knows the names of all.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from moesaic.usage.nearest import proposal
from moesaic.usage.variables import ENV_PREFIX

SETTINGS = Path(__file__).with_name("settings.txt")
ROLES = ("gateway", "scheduler", "attention", "expert", "edge-agent")

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
        "MOESAIC_ATTENTION_GPU",
        "MOESAIC_EXPERT_GPU",
        "MOESAIC_GRAFANA_IMAGE",
        "MOESAIC_GRAFANA_PORT",
        "MOESAIC_PROMETHEUS_IMAGE",
        "MOESAIC_PUBLISH",
        "MOESAIC_PUBLISH_GRAFANA",
        "MOESAIC_REDIS_IMAGE",
        "MOESAIC_STOP_GRACE_PERIOD",
        "MOESAIC_TAG",
        "MOESAIC_TORCH_INDEX",
    }
)
# Read by tests and benchmarks.
DEVELOPMENT = frozenset(
    {
        "MOESAIC_BENCH_BEFORE",
        "MOESAIC_BENCH_LARGE",
        "MOESAIC_BENCH_LAYERS",
        "MOESAIC_BENCH_LLAMA_CPP",
        "MOESAIC_BENCH_VLLM",
        "MOESAIC_COMMAND",
        "MOESAIC_NPM",
        "MOESAIC_OPEN_WEBUI",
        "MOESAIC_TEST_ENGINE",
    }
)
OTHERS = COMMANDS | KERNELS | COMPOSE | DEVELOPMENT

# Variables that Kubernetes, and Docker's links, set for a service named moesaic-something.
_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?$"
)


def settings_model(role: str) -> Any:
    """Import the settings of a service when they are needed, as no room may know the services."""
    module = import_module(f"moesaic.services.{role.replace('-', '_')}.settings")
    return getattr(module, f"{role.title().replace('-', '')}Settings")


@cache
def settings() -> frozenset[str]:
    """Name the variables of all settings of services, also of services that are not installed here.

    An image holds one service, and its environment may name settings of others. ``make reference`` writes the list.
    """
    return frozenset(SETTINGS.read_text(encoding="utf-8").split())


def unknown_variables(
    environment: Mapping[str, str], more: Collection[str] = frozenset()
) -> list[str]:
    """Write one line for each ``MOESAIC_*`` variable with a value that no program reads.

    Args:
        environment: variables by name; upper and lower case are the same.
        more: known names besides ``OTHERS`` and those of settings.
    """
    known = OTHERS | settings() | frozenset(more)
    named = sorted(name for name, value in environment.items() if value and _is_ours(name))
    return [
        f"{name}: unknown variable{proposal(name.upper(), known)}"
        for name in named
        if name.upper() not in known and not _is_link(name.upper(), environment[name])
    ]


def unknown_files(directory: Path, more: Collection[str] = frozenset()) -> list[str]:
    """Write the same for files of secrets, named like variables in lower case."""
    known = {name.lower() for name in OTHERS | settings() | frozenset(more)}
    return [
        f"{directory / name}: unknown setting{proposal(name.lower(), known)}"
        for name in _ours_in(directory)
        if name.lower() not in known
    ]


def _is_ours(name: str) -> bool:
    return name.upper().startswith(ENV_PREFIX)


def _ours_in(directory: Path) -> Iterator[str]:
    return iter(sorted(file.name for file in directory.iterdir() if _is_ours(file.name)))


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)
