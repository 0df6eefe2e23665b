"""Operators who ask a suite for the impossible are told so."""

import json

from tests.suites import Suite


def test_a_pin_to_a_worker_that_is_not_there_waits_and_is_told(disaggregated: Suite) -> None:
    pin = ("experts", "pin", "7", "expert-9")

    pinned = disaggregated.cli(*pin)
    waiting, shown = [""], ""
    while f"waiting for: {waiting[0]}" not in shown:
        # The scheduler looks at pins in its own time, and may be busy with others, before and in between.
        facts = json.loads(disaggregated.cli("placement", "show", "--json").stdout)
        waiting = [reason for reason in facts["waiting_for"] if "expert-9" in reason] or [""]
        shown = disaggregated.cli("placement", "show").stdout if waiting[0] else ""
    removed = disaggregated.cli(*pin, "--remove")

    assert pinned.returncode == 0
    assert "no expert worker expert-9 is here now (expert-0, expert-1)" in pinned.stderr
    assert "expert 7 is pinned to it" in shown
    assert (removed.returncode, removed.stderr) == (0, "")


def test_a_layer_that_is_not_there_is_wrong_use(disaggregated: Suite) -> None:
    shown = disaggregated.cli("experts", "ls", "--layer", "77")

    assert shown.returncode == 2
    assert "--layer 77: layers with experts are [0, 1, 2, 3, 4, 5, 6, 7]" in shown.stderr


def test_a_plan_that_changes_nothing_is_told_in_one_line(disaggregated: Suite) -> None:
    plan = disaggregated.directory / "plan.json"
    assert disaggregated.cli("placement", "policy", "keep").returncode == 0
    for _ in range(3):  # what was under way already may still be committed in between
        made = disaggregated.cli("placement", "plan", "--policy", "keep", "--out", str(plan))
        assert made.returncode == 0
        shown = disaggregated.cli("placement", "diff", str(plan))
        if "the plan was made for epoch" not in shown.stderr:
            break
    assert disaggregated.cli("placement", "policy", "auto").returncode == 0

    assert (shown.returncode, shown.stdout) == (0, "")
    assert "nothing changes" in shown.stderr
