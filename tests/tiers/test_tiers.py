"""The choice of the quick tier, and the sharing of files among processes."""

import json
from collections import Counter
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.chosen import CASE_S, FREE_S, PARTS, TURNS, Costs, chosen, has_turn
from tests.tiers.costs import main as write_costs
from tests.tiers.plugin import ByFolder, in_turn, values_of
from tests.tiers.reached import ROOT, module_of, reached_by
from tests.tiers.run import balanced, files_of, told, whole_in
from tests.tiers.tiers import ALWAYS, ON_CHANGE, TIERS

MATRIX = {
    f"case[{a}-{b}-{c}]": frozenset({("a", a), ("b", b), ("c", c)})
    for a, b, c in product(range(4), range(3), range(3))
}


def test_all_cases_of_a_cheap_function_run() -> None:
    assert chosen(MATRIX, FREE_S / len(MATRIX) / 2, 0) == list(MATRIX)


def test_each_costly_case_runs_in_one_of_sixteen_parts() -> None:
    parts = [chosen(MATRIX, 2 * CASE_S, part) for part in range(PARTS)]

    assert sorted(case for part in parts for case in part) == sorted(MATRIX)


def test_each_costly_case_has_a_turn_in_every_fourth_part_with_its_sixteenth() -> None:
    turns = [{case for case in MATRIX if has_turn(case, part)} for part in range(PARTS)]

    assert set().union(*turns[:TURNS]) == set(MATRIX)
    assert sum(map(len, turns[:TURNS])) == len(MATRIX)
    assert all(set(chosen(MATRIX, 2 * CASE_S, part)) <= turns[part] for part in range(PARTS))


def test_a_turn_leaves_out_nothing_but_costly_cases_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = {
        file: {"test_dear": (40, 40.0), "test_cheap": (40, 4.0)} for file in ("a.py", "b.py")
    }
    monkeypatch.setattr(Costs, "read", lambda: Costs(functions, {}))
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{file}::{name}[{case}]", path=ROOT / file)
        for file, name, case in product(
            ("a.py", "b.py"), ("test_dear", "test_cheap", "test_new"), range(40)
        )
    ]

    found = Counter(
        item.nodeid.partition("[")[0] for item in in_turn(items, 2, {"b.py"}, TIERS["rest-turn"])
    )

    assert 0 < found.pop("a.py::test_dear") < 20
    assert len(found) == 5
    assert set(found.values()) == {40}


def test_suites_take_turns_by_file_and_some_always_run() -> None:
    tier = TIERS["suites-turn"]
    files = files_of(tier, ())
    items: list[Any] = [SimpleNamespace(nodeid=file, path=ROOT / file) for file in files]

    turns = [
        [item.nodeid for item in in_turn(items, part, whole_in(tier, [], False, part), tier)]
        for part in range(TURNS)
    ]

    assert Counter(chain.from_iterable(turns)) == Counter(
        {file: TURNS if file in ALWAYS else 1 for file in files}
    )
    assert set(ALWAYS) <= set(files)


def test_tests_that_have_changed_and_a_quarter_of_those_of_training_run_whole_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.tiers.run.reached_by", lambda changed: set())
    tier, changed = TIERS["rest-turn"], ["tests/tiers/test_tiers.py", "LICENSE"]
    studies = {file for file in files_of(TIERS["all"], ()) if file.startswith(ON_CHANGE)}

    whole = [whole_in(tier, changed, False, part) for part in range(TURNS)]

    assert all("tests/tiers/test_tiers.py" in files for files in whole)
    assert set().union(*whole) == {"tests/tiers/test_tiers.py"} | studies
    assert sum(map(len, whole)) == len(studies) + TURNS
    assert set(files_of(tier, whole[0])) & studies == whole[0] & studies
    assert whole_in(TIERS["quick"], changed, False, 0) == set()


def test_a_turn_tells_how_many_wait_for_theirs() -> None:
    ran = [{"clock_s": 1.0, "cpu_s": 1.0, "id": "test"}] * 4

    said = told("rest-turn", Counter(), [*ran, {"waiting": 6}, {"waiting": 8}], 1.0)

    assert said.endswith(" by commit: make test-rest runs all")
    assert "ran 4 of 18;" in said
    assert "runs all" not in told("rest", Counter(), ran, 1.0)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_first_cases_of_a_matrix_have_as_many_pairs_as_they_can(part: int) -> None:
    found = chosen(MATRIX, CASE_S / 4, part)

    assert len(found) == 4
    values = [MATRIX[case] for case in found]
    assert len(frozenset().union(*values)) == 4 + 3 + 3, "a value has no case"
    assert all(len(one & other) <= 1 for one in values for other in values if one != other)


def test_one_process_runs_what_shares_suites() -> None:
    tests = ["tests/system/edge/test_a.py::test_a[x::y]", "tests/system/edge/test_b.py::test_b"]
    tests += ["tests/cli/test_a.py::test_a", "tests/cli/test_b.py::test_b"]

    scopes = [ByFolder._split_scope(None, test) for test in tests]  # type: ignore[arg-type]

    assert scopes == ["tests/system/edge"] * 2 + ["tests/cli/test_a.py", "tests/cli/test_b.py"]


@pytest.mark.parametrize("one", [1, 2])
@pytest.mark.parametrize("other", ["a", [2]])
def test_a_case_has_the_values_of_its_parameters(
    one: int, other: object, request: pytest.FixtureRequest
) -> None:
    known = other if isinstance(other, str) else id(other)
    assert values_of(request.node) == {("one", one), ("other", known)}


NAMES = st.builds("tests/{}/test_{}.py".format, st.integers(0, 9), st.integers())


@given(st.dictionaries(NAMES, st.floats(0, 100), max_size=60), st.integers(1, 5))
def test_each_file_has_one_process_and_none_has_much_more_than_others(
    costs_s: dict[str, float], number: int
) -> None:
    shares = balanced(costs_s, costs_s, number)

    assert sorted(file for share in shares for file in share) == sorted(costs_s)
    # The last part that a process gets goes where least is; it is one file, or at most an equal share.
    loads = [sum(costs_s[file] + 0.05 for file in share) for share in shares]
    equal = sum(loads) / number
    assert (
        max(loads, default=0) <= equal + max([equal, *(s + 0.05 for s in costs_s.values())]) + 1e-6
    )


def test_the_files_of_a_folder_stay_together_unless_they_are_too_many() -> None:
    costs_s = dict.fromkeys(("tests/a/test_a.py", "tests/a/b/test_b.py"), 1.0)
    costs_s |= {f"tests/c/test_{number}.py": 1.0 for number in range(6)}

    shares = balanced(costs_s, costs_s, 2)

    assert [len(share) for share in shares] == [4, 4]
    assert any({"tests/a/test_a.py", "tests/a/b/test_b.py"} <= set(share) for share in shares)


def test_quick_and_rest_are_expected_to_cost_what_all_costs() -> None:
    costs = Costs.read()
    for file in costs.others_s:
        whole, quick, rest, turn = (
            costs.of_file(file, share) for share in ("all", "quick", "rest", "turn")
        )
        assert quick + rest == pytest.approx(whole)
        assert -1e-9 <= turn <= rest + 1e-9
        assert 0 <= quick <= whole


def test_the_quick_tier_leaves_out_what_runs_on_a_change_only() -> None:
    study = next(file for file in files_of(TIERS["all"], ()) if file.startswith(ON_CHANGE))

    assert study not in files_of(TIERS["quick"], ())
    assert study in files_of(TIERS["quick"], {study})
    assert study in files_of(TIERS["rest"], ())


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("libs/moesaic/fairness.py", "moesaic.fairness"),
        ("libs/moesaic/engine/__init__.py", "moesaic.engine"),
        ("services/gateway/main.py", "moesaic.services.gateway.main"),
        ("libs/moesaic/native/sources/calls.h", "moesaic.native.library"),
        ("LICENSE", ""),
    ],
)
def test_a_path_changes_a_module(path: str, module: str) -> None:
    assert module_of(path) == module


def test_a_change_reaches_tests_through_other_modules_and_conftest_files() -> None:
    by_import = reached_by(["libs/moesaic/fairness.py"])
    assert "tests/engine/steps/test_batching_histories.py" in by_import
    assert "tests/models/text/test_chat.py" not in by_import
    by_conftest = reached_by(["tests/gateway/conftest.py"])
    assert {file for file in by_conftest if not file.startswith("tests/gateway/")} == set()
    assert "tests/gateway/test_language.py" in by_conftest
    assert reached_by(["LICENSE"]) == set()


def test_files_that_were_not_measured_keep_their_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, new, gone = "tests/tiers/test_tiers.py", "tests/test_house.py", "tests/test_gone.py"
    costs, records = tmp_path / "costs.json", tmp_path / "records.jsonl"
    functions = {kept: {"test_a": [2, 3.0]}, new: {"test_b": [1, 9.0]}, gone: {"test_c": [1, 1.0]}}
    before = {"functions": functions, "others_s": {kept: 0.5, new: 0.5, gone: 0.5}}
    costs.write_text(json.dumps(before))
    record = {"file": new, "function": "test_d", "clock_s": 2.0, "cpu_s": 1.0}
    records.write_text(json.dumps(record))
    monkeypatch.setattr("tests.tiers.chosen.COSTS", costs)
    monkeypatch.setattr("tests.tiers.costs.COSTS", costs)

    write_costs(records)

    after = json.loads(costs.read_text())
    assert after["functions"] == {kept: {"test_a": [2, 3.0]}, new: {"test_d": [1, 2.0]}}
    assert after["others_s"] == {kept: 0.5, new: 0}
