"""Flags of ``moesaic up`` by topology. Others are refused, not passed over."""

from collections.abc import Mapping

from moesaic.cli.terminal.outcome import CommandError, Exit

_OTHERS = ("local", "disaggregated", "gathered", "all-to-all")
_NO_AGENTS = "has no agents; give --topology edge as well, or leave it out"
# Flags with the topologies that take them, and what is to be said about the others.
TAKEN_BY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--experts": (("disaggregated",), "has no expert workers"),
    "--slots-per-layer": (("disaggregated",), "has no expert workers"),
    "--standby-attention": (("disaggregated",), "has no workers on standby"),
    "--standby-experts": (("disaggregated",), "has no workers on standby"),
    "--attention": (_OTHERS, "has no attention workers; give --agents"),
    "--offload": (_OTHERS[:3], "has no such mode"),
    "--agents": (("edge",), _NO_AGENTS),
    "--memory": (("edge",), _NO_AGENTS),
    "--link": (("edge",), _NO_AGENTS),
}


def check_topology(topology: str, given: Mapping[str, object]) -> None:
    """Check that a topology takes the flags that were given.

    Args:
        topology: of the suite.
        given: values by flag; one that is false was not given.

    Raises:
        CommandError: naming the first flag that it does not take.
    """
    for flag, value in given.items():
        topologies, why = TAKEN_BY[flag]
        if value and topology not in topologies:
            raise CommandError(f"{flag}: the {topology} topology {why}", Exit.USAGE)
