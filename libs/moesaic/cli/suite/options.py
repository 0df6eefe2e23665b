"""The options of a suite, as ``moesaic up`` takes them and as its processes are made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

import typer

from moesaic.cli.checks.sizes import read_memory
from moesaic.cli.clients.rest_key import API_KEY_VARIABLE, KEYS_FILE_VARIABLE
from moesaic.cli.machine.links.link import LinkShape, read_link
from moesaic.cli.terminal.outcome import CommandError, Exit

Topology = Literal["local", "disaggregated", "gathered", "all-to-all", "edge"]

EDGE_PANEL = "Edge topology"
_WITH_ATTENTION = ("local", "disaggregated", "gathered", "all-to-all")
_NO_AGENTS = "has no agents; give --topology edge as well, or leave it out"
# Fields with the topologies that take them, and the reason why others refuse them.
_TAKEN_BY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "experts": (("disaggregated",), "has no expert workers"),
    "slots_per_layer": (("disaggregated",), "has no expert workers"),
    "standby_attention": (("disaggregated",), "has no workers on standby"),
    "standby_experts": (("disaggregated",), "has no workers on standby"),
    "attention": (_WITH_ATTENTION, "has no attention workers; give --agents"),
    "offload": (_WITH_ATTENTION[:3], "has no such mode"),
    "agents": (("edge",), _NO_AGENTS),
    "memory": (("edge",), _NO_AGENTS),
    "link": (("edge",), _NO_AGENTS),
}


@dataclass(frozen=True)
class Setting:
    """A setting that was given to the suite, for those services that have it."""

    flag: str  # with its value, --dtype=bfloat16
    roles: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The suite that the user asked for. Fields with a ``typer.Option`` are options of ``moesaic up``.

    Raises:
        CommandError: a size of memory or the link is wrong.
    """

    topology: Annotated[
        Topology,
        typer.Option(
            envvar="MOESAIC_TOPOLOGY",
            metavar="[local|disaggregated|gathered|edge]",  # all-to-all is there to compare with
            help="Place of the experts: in every attention worker (local); in workers of their own "
            "(disaggregated); divided among the attention workers, which pull each other's layer "
            "by layer (gathered); or divided among agents with little memory each, which ask each "
            "other (edge).",
        ),
    ] = "disaggregated"
    model: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_MODEL",
            help="HF-format model directory, or a repository of the Hugging Face hub: owner/name or "
            "owner/name@revision (default: the demo model of a clone).",
        ),
    ] = ""
    attention: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_ATTENTION",
            min=1,
            max=64,
            help="Number of attention workers.",
        ),
    ] = 1
    experts: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_EXPERTS",
            min=1,
            max=256,
            help="Number of expert workers.",
        ),
    ] = 2
    slots_per_layer: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_SLOTS_PER_LAYER",
            min=0,
            help="Expert slots of each expert worker per layer; 0: enough.",
        ),
    ] = 0
    standby_attention: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_STANDBY_ATTENTION",
            min=0,
            max=64,
            help="Further attention workers, loaded but without work until 'moesaic scale' wants them.",
        ),
    ] = 0
    standby_experts: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_STANDBY_EXPERTS",
            min=0,
            max=256,
            help="Further expert workers, likewise.",
        ),
    ] = 0
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            envvar="MOESAIC_OFFLOAD",
            help="Keep experts of attention workers in files, and only a few layers of them in "
            "memory; disaggregated: for steps in which that is faster than expert workers.",
        ),
    ] = False
    agents: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_AGENTS",
            rich_help_panel=EDGE_PANEL,
            min=1,
            max=64,
            help="Number of agents, each an edge server.",
        ),
    ] = 3
    memory: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_MEMORY",
            rich_help_panel=EDGE_PANEL,
            help="Memory of an agent for the model: one size for all, such as 40M, or one for each, "
            "such as 40M,40M,80M (default: enough for all experts).",
        ),
    ] = ""
    link: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_LINK",
            rich_help_panel=EDGE_PANEL,
            help="Rate, or rate and delay, of the links between agents, such as 500mbit,2ms; needs "
            "root. A frame has the delay once on its way (default: no limits).",
        ),
    ] = ""
    memory_fraction: Annotated[
        float,
        typer.Option(
            envvar="MOESAIC_MEMORY_FRACTION",
            min=0.05,
            max=1.0,
            help="Part of the free memory of the machine, and of each GPU, that the suite may take.",
        ),
    ] = 0.9
    devices: Annotated[
        str,
        typer.Option(
            envvar="MOESAIC_DEVICES",
            metavar="auto|cpu|cuda:0,cuda:1",
            help="Devices to share out among the workers; auto: all GPUs that torch sees, or the CPU where there are "
            "none and for what needs it (--quantization, --offload, gathered and edge).",
        ),
    ] = "auto"
    host: Annotated[
        str, typer.Option(envvar="MOESAIC_HOST", help="Address the gateway listens on.")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            envvar="MOESAIC_PORT",
            min=0,
            max=65535,
            help="Port of the gateway; 0 takes a free one.",
        ),
    ] = 8000
    api_key: Annotated[
        str,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="Key that callers must send; better given by the variable, hidden from other users.",
        ),
    ] = field(default="", repr=False)
    api_keys_file: Annotated[
        str,
        typer.Option(
            envvar=KEYS_FILE_VARIABLE,
            help="File of tenants with their keys and limits, made by 'moesaic api-key new'.",
        ),
    ] = ""
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth",
            envvar="MOESAIC_NO_AUTH",
            help="Let the gateway listen beyond this machine without a key.",
        ),
    ] = False
    settings: tuple[Setting, ...] = ()  # of services, besides the fields above
    places: Mapping[str, str] = field(default_factory=dict)  # CUDA devices by process

    def __post_init__(self) -> None:
        _ = self.memory_bytes, self.link_shape  # read to refuse what is wrong

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes of each agent; empty: enough for all experts."""
        return read_memory(self.memory, self.agents)

    @property
    def link_shape(self) -> LinkShape | None:
        """The links between agents; None: they are on one host."""
        return read_link(self.link) if self.link else None

    @property
    def all_attention(self) -> int:
        """Attention workers, those on standby too."""
        return self.attention + self.standby_attention

    @property
    def all_experts(self) -> int:
        """Expert workers, those on standby too."""
        return self.experts + self.standby_experts

    @property
    def flags(self) -> list[str]:
        """The flags of ``moesaic up`` for the same suite, without the API key: every user can read flags."""
        flags = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in ("api_key", "settings", "places") or value == option.default:
                continue
            flag = "--" + option.name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        return [*flags, *(setting.flag for setting in self.settings)]


def check_topology(topology: Topology, given: Mapping[str, object]) -> None:
    """Check that a topology takes the options that were given: others are refused, not passed over.

    Args:
        topology: of the suite.
        given: values by field of ``SuiteOptions``; one that is false does not count.

    Raises:
        CommandError: naming the first option that it does not take.
    """
    for name, value in given.items():
        topologies, why = _TAKEN_BY.get(name, ((topology,), ""))
        if value and topology not in topologies:
            flag = name.replace("_", "-")
            raise CommandError(f"--{flag}: the {topology} topology {why}", Exit.USAGE)
