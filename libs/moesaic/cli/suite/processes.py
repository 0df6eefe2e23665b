"""The processes of a suite and their flags; pure."""

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moesaic.addresses import host_port, is_everywhere
from moesaic.cli.machine.links.cables import Cable, CableNetwork
from moesaic.cli.machine.links.network import forwarding_command
from moesaic.cli.suite.options import SuiteOptions, Topology
from moesaic.cli.terminal.outcome import CommandError, Exit

# Order of stopping: no service accepts work for another that is gone already.
STOP_ORDER = ("gateway", "edge-agent", "attention", "expert", "scheduler", "links")
NAMES = {"edge-agent": "agent"}  # of processes, where it is not the role
DISPATCHES: Mapping[Topology, str] = {
    "local": "local",
    "disaggregated": "routed",
    "gathered": "gathered",
    "all-to-all": "all-to-all",
    "edge": "collaborative",
}
LOOPBACK = "127.0.0.1"
GRACE_S = 30.0  # time for running work to finish


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process of a suite, started with ``python -m moesaic.services.<role>`` unless it says how."""

    name: str
    role: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK  # where its gRPC and metrics are reached
    enter: tuple[str, ...] = ()  # words before its command, which run it somewhere else
    program: tuple[str, ...] = ()  # its command, if it is none of our services and has no ports


def slots_per_layer(options: SuiteOptions, num_experts: int) -> int:
    """Count the expert slots that each expert worker offers per layer.

    Raises:
        CommandError: all workers together have fewer slots than the model has experts.
    """
    if not options.slots_per_layer:
        return math.ceil(num_experts / options.experts)
    slots = options.slots_per_layer * options.experts
    if slots < num_experts:
        raise CommandError(
            f"--slots-per-layer {options.slots_per_layer}: {options.experts} expert workers hold "
            f"{slots} of the model's {num_experts} experts per layer; give --slots-per-layer "
            f"{math.ceil(num_experts / options.experts)} or more --experts",
            Exit.USAGE,
        )
    return options.slots_per_layer


def module_of(role: str) -> str:
    """Name the module that runs a service of this role."""
    return f"moesaic.services.{role.replace('-', '_')}"


def roles_of(topology: Topology) -> tuple[str, ...]:
    """List the roles whose settings a suite of this topology takes as flags."""
    computing = ("edge-agent",) if topology == "edge" else ("attention", "expert")
    return ("gateway", *computing, "scheduler")


def threads_of(options: SuiteOptions, cores: int) -> dict[str, int]:
    """Divide the cores among the threads of services that compute, by role.

    Where rows travel, attention and experts take turns: each side has all cores in its turn, if cores
    are few. Where there are many, turns overlap and the sides share them.
    """
    if options.topology == "edge":
        return {"edge-agent": max(1, cores // options.agents)}
    if options.topology != "disaggregated":
        return {"attention": max(1, cores // options.attention)}
    attention, experts = options.all_attention, options.all_experts
    sides = 1 if cores < 2 * (attention + experts) else 2
    return {
        "attention": max(1, cores // sides // attention),
        "expert": max(1, cores // sides // experts),
    }


def services_of(
    options: SuiteOptions, num_experts: int, cores: int, network: CableNetwork | None = None
) -> list[Service]:
    """List the services of a suite; those that compute divide ``cores`` evenly.

    Args:
        options: of the suite.
        num_experts: of the model, in a layer.
        cores: of the machine.
        network: that agents are to run in; None: on this host.
    """
    threads = threads_of(options, cores)
    numbers = numbers_of(options)
    environment: dict[str, str] = {}
    # The gateway and the scheduler want time as well.
    if sum(numbers.values()) + 2 > cores:
        # Threads that spin while they wait would take the cores from those that work.
        environment["OMP_WAIT_POLICY"] = "passive"

    def computing(role: str, number: int) -> Service:
        of_role = str(threads[role])
        cable = network.cables[number] if network else None
        flags = _work_of(options, role, number, num_experts)
        flags += ("--data-host", cable.address if cable else LOOPBACK, "--data-port", "0")
        # Agents are machines: tensors go from one to another over the cables.
        if cable:
            flags += ("--node", cable.agent, "--transports", "socket")
        flags += ("--model", options.model, "--threads", of_role)
        if device := options.places.get(name_of(role, number)):
            flags += ("--device", device)
        service = _service(options, name_of(role, number), role, *flags, cable=cable)
        return replace(service, environment={"OMP_NUM_THREADS": of_role, **environment})

    workers = [computing(role, n) for role, count in numbers.items() for n in range(count)]
    auth = ["--no-auth"] if options.no_auth else []
    if options.api_keys_file:
        auth += ["--api-keys-file", options.api_keys_file]
    flags = ("--port", str(options.port), "--model", options.model, *auth)
    gateway = _service(options, "gateway", "gateway", *flags, host=options.host)
    services = [_service(options, "scheduler", "scheduler"), *workers, gateway]
    if network and (program := forwarding_command(network)):
        services.insert(0, Service(name="links", role="links", flags=(), program=program))
    return services


def name_of(role: str, number: int) -> str:
    """Name a process that computes, which is its worker id, too."""
    return f"{NAMES.get(role, role)}-{number}"


def numbers_of(options: SuiteOptions) -> dict[str, int]:
    """Count the processes that compute, by role, in the order in which they start; the last are on standby."""
    if options.topology == "edge":
        return {"edge-agent": options.agents}
    if options.topology == "disaggregated":
        return {"expert": options.all_experts, "attention": options.all_attention}
    return {"attention": options.attention}


def _work_of(options: SuiteOptions, role: str, number: int, num_experts: int) -> tuple[str, ...]:
    """List the flags that say what part of the work a process has."""
    if role == "edge-agent":
        own = ("--weights-port", "0")
        if not options.memory_bytes:
            return own
        return (*own, "--memory-bytes", str(options.memory_bytes[number]))
    if role == "expert":
        slots = str(slots_per_layer(options, num_experts))
        standby = ("--standby",) if number >= options.experts else ()
        return ("--slots-per-layer", slots, "--weights-port", "0", *standby)
    offload = ("--offload",) if options.offload else ()
    dispatch = DISPATCHES[options.topology]
    if options.topology in ("gathered", "all-to-all"):
        return ("--dispatch", dispatch, "--share", f"{number}/{options.attention}", *offload)
    standby = ("--standby",) if number >= options.attention else ()
    return ("--dispatch", dispatch, *offload, *standby)


def _service(
    options: SuiteOptions,
    name: str,
    role: str,
    *flags: str,
    host: str = "",
    cable: Cable | None = None,
) -> Service:
    # Only REST is for others; calls between the services stay on this machine.
    own = cable.address if cable else LOOPBACK
    inside = ("--control-host", own, "--advertise-host", own)
    place = ("--worker-id", name, "--host", host or own, *inside)
    settings = [setting.flag for setting in options.settings if role in setting.roles]
    return Service(
        name=name,
        role=role,
        flags=(*place, "--grace-s", str(GRACE_S), *flags, *settings),
        host=own,
        enter=cable.enter if cable else (),
    )


def url_of(options: SuiteOptions, gateway: object) -> str:
    """Give the address at which processes on this machine reach the gateway.

    Args:
        options: of the suite.
        gateway: the gateway's checked settings.

    Raises:
        CommandError: the gateway wants a certificate of each client, and the commands have none.
    """
    if getattr(gateway, "ssl_cert_reqs", 0) == ssl.CERT_REQUIRED:
        fix = "asks each client for a certificate, and this command has none: give 0 or 1"
        raise CommandError(f"--ssl-cert-reqs 2 {fix}, or start the services one by one")
    scheme = "https" if getattr(gateway, "ssl_certfile", "") else "http"
    return f"{scheme}://{host_port(_reachable(options.host), options.port)}"


def _reachable(host: str) -> str:
    return LOOPBACK if is_everywhere(host) else host
