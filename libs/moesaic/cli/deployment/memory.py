"""The experts and the KV of each worker of a cluster, as the memory of its GPUs allows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesaic.cli.deployment.hosts import HostsFile, Value
from moesaic.cli.deployment.services import HostService
from moesaic.cli.suite.devices import MACHINE, UNKNOWN_BYTES
from moesaic.cli.suite.memory_plan import SuiteMemory, plan_suite
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.processes import name_of
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.models.configuration.config import ModelConfig
from moesaic.prefix.blocks import BLOCK_SIZE

if TYPE_CHECKING:
    from moesaic.settings import ServiceSettings

GIB = 1 << 30


@dataclass(frozen=True)
class _Workers:
    """The workers of a cluster, as one suite whose places are all GPUs of all hosts.

    Attributes:
        names: worker id by the name of the process in the plan.
        settings: by the name of the process, with a device of its own for each GPU of the cluster.
        available: bytes by place. Several GPUs of one worker are places side by side, one for each rank.
        homes: by place, the GPU and its host.
    """

    names: Mapping[str, str]
    settings: "Mapping[str, ServiceSettings]"
    available: Mapping[str, int]
    homes: Mapping[str, str]


def computed_settings(
    cluster: HostsFile,
    services: list[HostService],
    settings: "Mapping[str, ServiceSettings]",
    config: ModelConfig,
) -> dict[str, dict[str, Value]]:
    """Compute the slots of expert workers, and the memory of workers that share a GPU.

    Expert workers on CPUs divide the experts evenly. If ``gpu_memory`` is not known for all GPUs, workers there decide
    at their start.

    Args:
        cluster: checked.
        services: of all hosts.
        settings: of each service, by its worker id.
        config: of the model.

    Returns:
        Settings by worker id.

    Raises:
        CommandError: there are fewer slots than experts, or a GPU has too little memory.
    """
    experts = [each for each in services if each.role == "expert"]
    if "edge-agent" in cluster.roles:
        return {}
    least = _least_slots(experts, config.moe.num_experts) if experts else 0
    on_cpus: dict[str, dict[str, Value]] = {
        each.worker_id: {"slots_per_layer": least} for each in experts if not each.gpus
    }
    if not all(cluster.memory_of(name) for name, host in cluster.hosts.items() if host.gpus):
        return on_cpus
    workers = _as_suite(cluster, services, settings)
    plan, slots = _roomiest(workers, config, least)
    found = {**on_cpus}
    by_name = {process.name: process for process in plan.processes}
    for name, worker_id in workers.names.items():
        process = by_name[name]
        if process.place == MACHINE:
            continue
        if process.role == "expert":
            limit = plan.expert_limit(process)
            found[worker_id] = {"slots_per_layer": slots, "max_expert_bytes": limit}
        elif sum(each.place == process.place for each in plan.processes) > 1:
            found[worker_id] = {"kv_blocks": plan.kv_tokens // BLOCK_SIZE}
    return found


def _least_slots(experts: list[HostService], num_experts: int) -> int:
    """Divide the experts of a layer among workers, but for slots that the description gives.

    Raises:
        CommandError: it gives too few.
    """
    given = [int(each.settings.get("slots_per_layer", 0)) for each in experts]
    left = num_experts - sum(given)
    if open_workers := given.count(0):
        return min(num_experts, max(1, -(-left // open_workers)))
    if left > 0:
        raise CommandError(
            f"settings.slots_per_layer: {len(given)} expert workers have {sum(given)} slots for {num_experts} experts "
            f"of a layer; give {-(-num_experts // len(given))}, or more expert workers",
            Exit.USAGE,
        )
    return max(given)


def _as_suite(
    cluster: HostsFile,
    services: list[HostService],
    settings: "Mapping[str, ServiceSettings]",
) -> _Workers:
    names: dict[str, str] = {}
    made: dict[str, ServiceSettings] = {}
    available = {MACHINE: UNKNOWN_BYTES}
    homes: dict[str, str] = {}
    first, firsts = 0, dict[str, int]()
    for host in cluster.hosts:
        firsts[host], first = first, first + len(cluster.hosts[host].gpus)
    counts: dict[str, int] = {}
    for service in services:
        if not service.worker:
            continue
        number = counts[service.role] = counts.get(service.role, -1) + 1
        name, worker_id = name_of(service.role, number), service.worker_id
        names[name], made[name] = worker_id, settings[worker_id]
        if not service.gpus:
            continue
        places = [f"cuda:{firsts[service.host] + gpu}" for gpu in service.gpus]
        for place, gpu in zip(places, service.gpus, strict=True):
            homes[place] = f"GPU {cluster.hosts[service.host].gpus[gpu]} of host {service.host}"
            available[place] = cluster.memory_of(service.host)
        made[name] = made[name].model_copy(update={"device": places[0]})
    return _Workers(names, made, available, homes)


def _roomiest(workers: _Workers, config: ModelConfig, least: int) -> tuple[SuiteMemory, int]:
    """Plan the most slots that leave the KV as it is with the least; 0: attention workers have all experts.

    Returns:
        The plan, and the slots of each worker for which the description gives none.

    Raises:
        CommandError: not even the least fit.
    """
    roles = [name.rpartition("-")[0] for name in workers.names]
    options = SuiteOptions(
        topology="disaggregated" if least else "local",
        attention=roles.count("attention"),
        experts=roles.count("expert"),
    )

    # All workers together have enough: ``_least_slots`` counts those that the description gives.
    enough = replace(options, slots_per_layer=config.moe.num_experts if least else 0)

    def plan(slots: int) -> SuiteMemory:
        settings = {
            name: of
            if getattr(of, "slots_per_layer", True)
            else of.model_copy(update={"slots_per_layer": slots})
            for name, of in workers.settings.items()
        }
        return plan_suite(enough, config, settings, workers.available)

    best = plan(least)
    for place, needed in best.needed.items():
        lacking = needed - best.room(place)
        if lacking > 0:
            home = workers.homes.get(place, place)
            held = {process.role for process in best.processes if process.place == place}
            with_slots = f" with {least} slots a layer" if "expert" in held else ""
            experts = with_slots if least else " with all experts"
            raise CommandError(
                f"gpu_memory: {home}: its workers need {needed / GIB:.1f} GiB{experts}, and may take "
                f"{best.room(place) / GIB:.1f} GiB, {lacking / GIB:.1f} GiB too few; give more GPUs to "
                f"{' or '.join(sorted(held))}, or a smaller settings.max_model_len",
                Exit.USAGE,
            )
    low, high = least, config.moe.num_experts if least else 0
    while low < high:
        middle = (low + high + 1) // 2
        tried = plan(middle)
        if tried.fits and tried.kv_tokens == best.kv_tokens:
            low = middle
        else:
            high = middle - 1
    return plan(low), low
