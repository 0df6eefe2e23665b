"""``moesaic simulate edge``: what it prints, draws and refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.cli.main import app
from moesaic.cli.terminal.outcome import CommandError, Exit

TRACE = str(Path(__file__).parents[3] / "benchmarks/data/demo.moetrace")
QUICK = ("simulate", "edge", "--requests", "2", "--trace", TRACE)


def test_points_come_as_json_and_as_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "edge.png"
    result = CliRunner().invoke(
        app, [*QUICK, "--gpus", "4,8", "--mbps", "100,1000", "--json", "--out", str(picture)]
    )
    facts = json.loads(result.stdout)

    assert len(facts["points"]) == 2 * 2 * 2 * 2
    point = facts["points"][0]
    assert (point["gpus"], point["policy"], point["mbit_per_s"]) == (4, "optimal", 100)
    assert point["events"] > 0
    assert abs(point["remote_share"] - point["predicted_remote_share"]) < 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_says_where_costs_are_from() -> None:
    result = CliRunner().invoke(
        app, [*QUICK, "--gpus", "4", "--mbps", "500", "--arrivals", "8", "--costs", "a100"]
    )

    assert "data sheet" in result.stdout
    assert "eplb" in result.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpus", "4,x"),
        ("--gpus", "4.5"),
        ("--mbps", "0"),
        ("--policy", "best"),
        ("--trace", "/nowhere"),
        ("--out", "/nowhere/at/all.png"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(option: str, value: str) -> None:
    result = CliRunner().invoke(app, [*QUICK, "--gpus", "4", option, value])

    assert isinstance(result.exception, CommandError)
    assert result.exception.status == Exit.USAGE
    assert option.removeprefix("--") in str(result.exception)
