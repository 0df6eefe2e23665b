"""Operators who ask a suite for the impossible are told so."""

import json
import subprocess

from tests.suites import Suite
from tests.waiting import eventually


def test_a_pin_to_a_worker_that_is_not_there_waits_and_is_told(disaggregated: Suite) -> None:
    pin = ("experts", "pin", "7", "expert-9")

    pinned = disaggregated.cli(*pin)

    def shown() -> str | None:
        # The scheduler looks at pins in its own time, and may be busy with others, before and in between.
        facts = json.loads(disaggregated.cli("placement", "show", "--json").stdout)
        text = disaggregated.cli("placement", "show").stdout
        waits = [each for each in facts["waiting_for"] if "expert-9" in each]
        return text if waits and f"waiting for: {waits[0]}" in text else None

    text = eventually(shown)
    removed = disaggregated.cli(*pin, "--remove")

    assert pinned.returncode == 0
    assert "no expert worker expert-9 is here now (expert-0, expert-1)" in pinned.stderr
    assert "expert 7 is pinned to it" in text
    assert (removed.returncode, removed.stderr) == (0, "")


def test_a_layer_that_is_not_there_is_wrong_use(disaggregated: Suite) -> None:
    shown = disaggregated.cli("experts", "ls", "--layer", "77")

    assert shown.returncode == 2
    assert "--layer 77: layers with experts are [0, 1, 2, 3, 4, 5, 6, 7]" in shown.stderr


def test_a_plan_that_changes_nothing_is_told_in_one_line(disaggregated: Suite) -> None:
    plan = disaggregated.directory / "plan.json"
    assert disaggregated.cli("placement", "policy", "keep").returncode == 0

    def diff() -> "subprocess.CompletedProcess[str] | None":
        made = disaggregated.cli("placement", "plan", "--policy", "keep", "--out", str(plan))
        assert made.returncode == 0
        shown = disaggregated.cli("placement", "diff", str(plan))
        # Another placement may have been under way already, and be committed in between.
        return None if "the plan was made for epoch" in shown.stderr else shown

    shown = eventually(diff)
    assert disaggregated.cli("placement", "policy", "auto").returncode == 0

    assert (shown.returncode, shown.stdout) == (0, "")
    assert "nothing changes" in shown.stderr
