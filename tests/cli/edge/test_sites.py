"""What ``moesaic status`` shows of edge agents."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from moesaic.cli.clients.fleet import gather_facts
from moesaic.cli.clients.sites import LINK_COLUMNS, SITE_COLUMNS, link_rows, site_facts, site_row
from moesaic.cli.commands.status import _print_sites
from moesaic.cluster.rpc.server import admin_server
from moesaic.settings import ServiceSettings
from moesaic.v1 import edge_agent_pb2 as pb
from moesaic.v1 import edge_agent_pb2_grpc

SECRET = "s" * 32
PROFILE = pb.GetProfileResponse(
    site="oslo",
    memory_limit_bytes=40_000_000,
    memory_used_bytes=31_250_000,
    num_slots=60,
    num_held=48,
    local=75,
    cached=4,
    loaded=1,
    remote=20,
    links=[pb.SiteLink(peer="agent-1", rtt_s=0.0045, bytes_per_s=12.5e6)],
)


class Agent(edge_agent_pb2_grpc.EdgeAgentServiceServicer):
    """Answers with one profile."""

    async def GetProfile(self, request: Any, context: Any) -> pb.GetProfileResponse:
        return PROFILE


def register(server: grpc.aio.Server) -> None:
    edge_agent_pb2_grpc.add_EdgeAgentServiceServicer_to_server(Agent(), server)


async def test_an_agent_tells_of_its_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOESAIC_SECRET", SECRET)
    settings = ServiceSettings(secret=SECRET)
    serving = admin_server(settings, "edge-agent", worker_id="agent-0", register=register)
    async with serving as server:
        known = {"agent-0": ("edge-agent", server.address), "other": ("expert", server.address)}
        (agent, other), _ = await gather_facts(known, None)

    edge = agent["edge"]
    assert (edge["site"], edge["local_share"], edge["cache_hit_rate"]) == ("oslo", 0.75, 0.8)
    assert edge["links"][0] == {
        "peer": "agent-1",
        "rtt_s": 0.0045,
        "bytes_per_s": 12.5e6,
        "message_s": 0.0,
        "row_s": 0.0,
    }
    assert "edge" not in other


async def test_who_does_not_answer_has_no_site() -> None:
    assert await site_facts("127.0.0.1:1") == {}


def facts(**changes: object) -> dict[str, Any]:
    known = {
        "site": "oslo",
        "memory_used_bytes": 31_250_000,
        "memory_limit_bytes": 40_000_000,
        "num_held": 48,
        "num_slots": 60,
        "local_share": 0.75,
        "cache_hit_rate": 0.8,
        "links": [{"peer": "agent-1", "rtt_s": 0.0045, "bytes_per_s": 12.5e6}],
    }
    return {**known, **changes}


def test_a_site_is_a_row_with_what_is_known() -> None:
    row = ("oslo", "31.2 of 40.0 MB", "48 of 60", "75%", "80%")
    assert site_row(facts()) == row
    assert len(row) == len(SITE_COLUMNS)

    new = facts(memory_limit_bytes=0, local_share=None, cache_hit_rate=None)
    assert site_row(new) == ("oslo", "31.2 MB", "48 of 60", "", "")


def test_a_link_is_a_row_with_the_names_of_its_sites() -> None:
    row = ("oslo", "bergen", "4.50 ms", "100 Mbit/s")
    near, far = facts(), facts(site="bergen", links=[{"peer": "x", "rtt_s": 0, "bytes_per_s": 0}])

    assert [*link_rows({"agent-0": near, "agent-1": far})] == [row, ("bergen", "x", "", "")]
    assert len(row) == len(LINK_COLUMNS)


def test_sites_and_links_are_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _print_sites({})
    assert capsys.readouterr().out == ""

    _print_sites({"agent-0": facts()})

    shown = capsys.readouterr().out
    for part in ("oslo", "31.2 of 40.0 MB", "round trip", "agent-1", "4.50 ms"):
        assert part in shown
