"""The options of a suite, as ``moesaic up`` takes them and as its processes are made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from moesaic.cli.checks.sizes import read_memory
from moesaic.cli.machine.links.link import LinkShape, read_link
from moesaic.cli.terminal.options import option
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
    "offload": (
        ("local", "gathered"),
        "keeps no experts in files; give --topology local or gathered",
    ),
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
    """The suite that the user asked for. Fields with an ``option`` are options of ``moesaic up``.

    Raises:
        CommandError: a size of memory or the link is wrong.
    """

    topology: Annotated[
        Topology,
        option(
            "Place of the experts. Local: in each attention worker. Disaggregated: in "
            "expert workers. Gathered: divided among attention workers, which fetch them "
            "layer by layer. Edge: divided among agents with little memory each.",
            metavar="[local|disaggregated|gathered|edge]",  # all-to-all is there to compare with
        ),
    ] = "disaggregated"
    model: Annotated[str, option("The same as MODEL, for scripts.")] = ""
    attention: Annotated[int, option("Number of attention workers.", min=1, max=64)] = 1
    experts: Annotated[int, option("Number of expert workers.", min=1, max=256)] = 2
    slots_per_layer: Annotated[
        int, option("Expert slots of each expert worker per layer; 0: enough.", min=0)
    ] = 0
    standby_attention: Annotated[
        int,
        option(
            "Further attention workers on standby: loaded, but without work until 'moesaic "
            "scale' activates them.",
            min=0,
            max=64,
        ),
    ] = 0
    standby_experts: Annotated[
        int, option("Further expert workers on standby.", min=0, max=256)
    ] = 0
    offload: Annotated[
        bool,
        option(
            "Keep experts in files, and only a few layers of experts in memory (local and "
            "gathered).",
            switch="--offload",
        ),
    ] = False
    agents: Annotated[
        int, option("Number of agents, each an edge server.", min=1, max=64, panel=EDGE_PANEL)
    ] = 3
    memory: Annotated[
        str,
        option(
            "Memory of each agent for the model: one size, such as 40M, or one for each "
            "agent, such as 40M,40M,80M (default: enough for all experts).",
            panel=EDGE_PANEL,
        ),
    ] = ""
    link: Annotated[
        str,
        option(
            "Rate, or rate and delay in one direction, of the links between agents, such as "
            "500mbit,2ms; needs root (default: no limits).",
            panel=EDGE_PANEL,
        ),
    ] = ""
    memory_fraction: Annotated[
        float,
        option(
            "Share of the free memory of the machine, and of each GPU, that the suite may use.",
            min=0.05,
            max=1.0,
        ),
    ] = 0.9
    devices: Annotated[
        str,
        option(
            "Devices for the workers; auto: all GPUs that torch finds, else the CPU. "
            "With --quantization or edge: the CPU.",
            metavar="auto|cpu|cuda:0,cuda:1",
        ),
    ] = "auto"
    host: Annotated[str, option("Address the gateway listens on.")] = "127.0.0.1"
    port: Annotated[int, option("Port of the gateway; 0 takes a free one.", min=0, max=65535)] = (
        8000
    )
    api_key: Annotated[
        str,
        option("Key that callers must send; set it by the variable to hide it from other users."),
    ] = field(default="", repr=False)
    api_keys_file: Annotated[
        str,
        option("File of tenants with their keys and limits, made by 'moesaic api-key new'."),
    ] = ""
    no_auth: Annotated[
        bool,
        option("Let the gateway listen beyond this machine without a key.", switch="--no-auth"),
    ] = False
    settings: tuple[Setting, ...] = ()  # of services, besides the fields above
    places: Mapping[str, str] = field(default_factory=dict)  # CUDA devices by process

    def __post_init__(self) -> None:
        # Read to refuse what is wrong.
        _ = self.memory_bytes, self.link_shape

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
        for one in fields(self):
            value, taken = getattr(self, one.name), _taken_by(one.name, self.topology)
            if not taken or value is False or one.name in ("api_key", "settings", "places"):
                continue
            flag = "--" + one.name.replace("_", "-")
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
        if value and not _taken_by(name, topology):
            flag, (_, why) = name.replace("_", "-"), _TAKEN_BY[name]
            raise CommandError(f"--{flag}: the {topology} topology {why}", Exit.USAGE)


def _taken_by(name: str, topology: Topology) -> bool:
    return name not in _TAKEN_BY or topology in _TAKEN_BY[name][0]
