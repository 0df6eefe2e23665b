"""``moesaic placement`` and ``moesaic experts`` against a real scheduler without workers, and none."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moesaic.cli.clients.decisions import as_dict, decision_note, decision_row, plan_text
from moesaic.cli.commands.placement import _read, _write
from moesaic.cli.main import app
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.v1 import placement_pb2
from moesaic.v1 import scheduler_pb2 as pb

NOBODY = "127.0.0.1:1"


def status(*arguments: str) -> tuple[int, str]:
    """How a command ends, and what it says."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, CommandError):
        return int(result.exception.status), str(result.exception)
    return result.exit_code, result.output


def plan(**fields: Any) -> pb.Plan:
    placement = placement_pb2.Placement(
        model_digest="0123",
        num_experts=2,
        workers=[placement_pb2.PlacedWorker(worker_id="7", generation=2**40, admin_address="h:1")],
        layers=[placement_pb2.PlacedLayer(layer=3, workers=[{"expert_ids": [0, 1, -1]}])],
    )
    return pb.Plan(placement=placement, base_epoch=2**33, policy="eplb", **fields)


@pytest.mark.parametrize(
    "arguments",
    [
        ("placement", "show"),
        ("placement", "plan"),
        ("placement", "diff"),
        ("placement", "policy", "keep"),
        ("brownout", "show"),
        ("brownout", "set", "--mode", "off"),
        ("experts", "ls"),
        ("experts", "pin", "1", "expert-0"),
    ],
)
def test_without_a_scheduler_commands_say_so(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOESAIC_SCHEDULER", raising=False)

    code, text = status(*arguments)
    assert (code, "nothing runs in this directory" in text) == (Exit.UNHEALTHY, True)
    assert status(*arguments, "--scheduler", NOBODY)[0] == Exit.UNHEALTHY


def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    made = plan(activated_before=4.0, activated_after=2.5, moved_bytes=2**35)
    _write(tmp_path / "plan.json", as_dict(made))

    assert _read(tmp_path / "plan.json") == made
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert (stored["base_epoch"], stored["moved_bytes"]) == (2**33, 2**35)
    assert stored["placement"]["workers"][0]["worker_id"] == "7"


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", "{", '{"no": 1}', '{"base_epoch": -1}', '"x"']
)
def test_a_file_that_is_no_plan_is_wrong_use(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)

    code, said = status("placement", "apply", str(file), "--scheduler", NOBODY)

    assert code == Exit.USAGE
    assert str(file) in said


def test_plans_and_decisions_are_told_with_what_is_known_and_no_more() -> None:
    known = plan(activated_before=4.0, activated_after=2.5, seconds=1.5, reason="because")
    assert "4.00 now, 2.50 then" in plan_text(known)
    assert "about 1.5 s" in plan_text(known)
    assert "now" not in plan_text(plan(reason="no traffic has been seen yet"))

    done = pb.Decision(at=0.0, cause="traffic", adopted=True, epoch=7, predicted_before=4.0,
                       predicted_after=2.0, measured_after=2.125, reason="gain")  # fmt: skip
    assert decision_row(done) == (*("01-01 00:00", "traffic", "7", "", 0, "4.00 -> 2.00", "2.12"),)
    assert decision_note(done) == "gain"
    failed = pb.Decision(cause="workers", adopted=True, failure="b: lost", reason="b came")
    assert decision_row(failed)[2:] == ("failed", "", 0, "", "")
    assert decision_note(failed) == "b came; b: lost"
    kept = pb.Decision(cause="traffic", adopted=False, epoch_before=5)
    assert decision_row(kept)[2] == "5 kept"
    begun = pb.Decision(cause="operator", adopted=True, reason="an operator asked for it")
    assert decision_row(begun)[2] == "under way"


def test_a_plan_whose_parts_do_not_fit_together_is_wrong_use(tmp_path: Path) -> None:
    made = plan()
    made.placement.layers[0].workers[0].expert_ids[0] = 99
    _write(tmp_path / "plan.json", as_dict(made))

    for command in ("apply", "diff"):
        code, said = status(
            "placement", command, str(tmp_path / "plan.json"), "--scheduler", NOBODY
        )
        assert code == Exit.USAGE
        assert "expert ids must be in -1..1" in said
