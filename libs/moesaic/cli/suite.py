"""Which processes make a suite, and with what flags? Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from moesaic.cli.outcome import CommandError, Exit

Topology = Literal["local", "disaggregated"]
# Who stops first: nobody takes work for others that are gone already.
STOP_ORDER = ("gateway", "attention", "expert", "scheduler")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """What the user asked for."""

    topology: Topology
    model: str
    attention: int
    experts: int
    slots_per_layer: int  # 0: just enough
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process of a suite that is started with ``python -m services.<role>``."""

    name: str
    role: str
    flags: tuple[str, ...]
    host: str = LOOPBACK  # where this machine reaches it
    environment: tuple[tuple[str, str], ...] = ()


def slots_per_layer(options: SuiteOptions, num_experts: int) -> int:
    """Expert slots that each expert worker offers per layer.

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


def services_of(options: SuiteOptions, num_experts: int, cores: int) -> list[Service]:
    """The services of a suite, each with its share of ``cores``."""
    disaggregated = options.topology == "disaggregated"
    num_experts_workers = options.experts if disaggregated else 0
    num_computing = options.attention + num_experts_workers
    threads = max(1, cores // num_computing)
    crowded = num_computing + 2 > cores  # the gateway and the scheduler want time as well
    environment: tuple[tuple[str, str], ...] = (("OMP_NUM_THREADS", str(threads)),)
    if crowded:  # threads that spin while they wait would take the cores from those that work
        environment += (("OMP_WAIT_POLICY", "passive"),)

    def service(role: str, number: int | None, *flags: str, computes: bool = False) -> Service:
        name = role if number is None else f"{role}-{number}"
        flags = ("--worker-id", name, *flags)
        if computes:
            flags += ("--model", options.model, "--threads", str(threads))
        return Service(
            name=name, role=role, flags=flags, environment=environment if computes else ()
        )

    services = [service("scheduler", None, "--host", LOOPBACK)]
    if disaggregated:
        slots = ("--slots-per-layer", str(slots_per_layer(options, num_experts)))
        services += [
            service("expert", number, "--host", LOOPBACK, *slots, computes=True)
            for number in range(num_experts_workers)
        ]
    dispatch = ("--dispatch", "routed" if disaggregated else "local")
    services += [
        service("attention", number, "--host", LOOPBACK, *dispatch, computes=True)
        for number in range(options.attention)
    ]
    return [*services, _gateway(options)]


def _gateway(options: SuiteOptions) -> Service:
    host = _reachable(options.host)
    flags = ("--worker-id", "gateway", "--host", options.host, "--advertise-host", host)
    flags += ("--port", str(options.port), "--model", options.model)
    return Service(name="gateway", role="gateway", flags=flags, host=host)


def url_of(options: SuiteOptions) -> str:
    """Where processes on this machine reach the gateway."""
    return f"http://{address(_reachable(options.host), options.port)}"


def address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "::") else host
