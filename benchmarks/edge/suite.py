"""The suite of edge servers that is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.edge.point import EdgePoint
from moesaic.cli.machine.links.link import read_link
from moesaic.cli.machine.links.network import joined
from moesaic.cli.terminal.outcome import CommandError


def links_are_permitted(point: EdgePoint) -> bool:
    """Test if this machine lets agents have networks of their own."""
    try:
        with joined(["agent-0"], read_link(point.link)):
            return True
    except CommandError:
        return False


@contextmanager
def edge_suite(point: EdgePoint, *, linked: bool, replan_s: float = 3600) -> Iterator[RunningSuite]:
    """Run servers that keep their experts until they are told otherwise.

    Args:
        point: servers and links.
        linked: links have a rate.
        replan_s: from plan to plan.
    """
    flags = ["--topology", "edge", "--agents", str(point.num_sites)]
    flags += ["--memory", ",".join(point.memory), "--kv-blocks", str(point.kv_blocks)]
    # As the memories are meant.
    flags += ["--dtype", "float32"]
    flags += ["--no-read-files", *(("--link", point.link) if linked else ())]
    flags += ["--placement-policy", "keep", "--replan-interval-s", str(replan_s)]
    flags += ["--activation-window-s", str(point.window_s)]
    with running_suite(*flags) as suite:
        yield suite
