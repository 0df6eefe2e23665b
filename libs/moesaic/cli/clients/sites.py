"""Facts about the sites of edge agents: their memory, the places of their experts, and their links."""

from collections.abc import Iterable, Mapping
from typing import Any

from moesaic.cli.clients.credentials import answer_if_any
from moesaic.v1 import edge_agent_pb2 as pb
from moesaic.v1 import edge_agent_pb2_grpc

ROLE = "edge-agent"
SITE_COLUMNS = ("site", "memory", "experts", "local", "cache hits")
LINK_COLUMNS = ("from", "to", "round trip", "rate")
_NUMBERS = (
    *("memory_used_bytes", "memory_limit_bytes", "num_slots", "num_held", "expert_bytes"),
    *("local", "cached", "loaded", "remote", "away_s", "layers_s"),
)
_OF_LINK = ("peer", "rtt_s", "bytes_per_s", "message_s", "row_s")


async def site_facts(admin_address: str) -> dict[str, Any]:
    """Ask an agent for its profile; empty if it does not answer, or not yet.

    Besides the fields of ``GetProfileResponse`` there are:

    ================== ==================================================================
    ``local_share``    Share of expert choices served from slots of this site. None before the
                       first choice.
    ``cache_hit_rate`` Share of experts from files that were in memory. None before the first.
    ================== ==================================================================
    """
    stub = edge_agent_pb2_grpc.EdgeAgentServiceStub
    found = await answer_if_any(admin_address, stub, "GetProfile", pb.GetProfileRequest())
    if found is None:
        return {}
    return {
        "site": found.site,
        **{name: getattr(found, name) for name in _NUMBERS},
        "local_share": _part(found.local, found.cached + found.loaded + found.remote),
        "cache_hit_rate": _part(found.cached, found.loaded),
        "links": [{name: getattr(link, name) for name in _OF_LINK} for link in found.links],
    }


def site_row(edge: Mapping[str, Any]) -> tuple[str, ...]:
    """Make a row of ``SITE_COLUMNS``; empty where nothing is known yet."""
    memory = f"{edge['memory_used_bytes'] / 1e6:.1f}"
    if limit := edge["memory_limit_bytes"]:
        memory += f" of {limit / 1e6:.1f}"
    experts = f"{edge['num_held']} of {edge['num_slots']}"
    parts = (edge["local_share"], edge["cache_hit_rate"])
    return (
        edge["site"],
        f"{memory} MB",
        experts,
        *("" if p is None else f"{p:.0%}" for p in parts),
    )


def link_rows(edges: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, ...]]:
    """Make rows of ``LINK_COLUMNS``, from facts by worker id; a peer that is known has its site's name."""
    for edge in edges.values():
        for link in edge["links"]:
            peer = edges.get(link["peer"])
            rtt_s, bytes_per_s = link["rtt_s"], link["bytes_per_s"]
            yield (
                edge["site"],
                peer["site"] if peer else link["peer"],
                f"{rtt_s * 1e3:.2f} ms" if rtt_s else "",
                f"{8 * bytes_per_s / 1e6:.0f} Mbit/s" if bytes_per_s else "",
            )


def _part(part: int, rest: int) -> float | None:
    return round(part / (part + rest), 4) if part + rest else None
