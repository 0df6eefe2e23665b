"""The part of pytest that a tier needs: chooses its tests, and writes down what each one costs.

``tests.tiers.run`` loads it with ``-p tests.tiers.plugin``.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Hashable, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.tiers.chosen import TURN_S, Costs, Values, chosen, has_turn
from tests.tiers.tiers import MODELS, ON_CHANGE, TIERS, Tier

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the tier, and the file that costs are written to."""
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=list(TIERS), required=True)
    group.addoption("--tier-part", type=int, default=0, help="which sixteenth of costly tests")
    group.addoption(
        "--tier-whole", default="", help="files that the quick tier or a turn runs whole"
    )
    group.addoption("--tier-records", type=Path, help="a line of JSON is added for each test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier: its marks are pytest's ``-m``, its share is decided here."""
    tier, part = TIERS[config.option.tier], config.option.tier_part
    whole = set(config.option.tier_whole.split())
    if tier.share == "all":
        return
    kept = items
    if not tier.starts_suites:
        # Beside a turn, the quick tier runs no file whole.
        quick = quick_tests(items, part, whole if tier.share == "quick" else set())
        kept = [item for item in items if (item in quick) == (tier.share == "quick")]
    if tier.share == "turn":
        rest, kept = kept, in_turn(kept, part, whole, tier)
        # Each process of pytest-xdist collects all tests; one tells.
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            _record(config, {"waiting": len(rest) - len(kept)})
    if left_out := set(items).difference(kept):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept


def in_turn(
    rest: Sequence[pytest.Item], part: int, whole: set[str], tier: Tier
) -> list[pytest.Item]:
    """The tests of the rest that run: cheap cases, a quarter of the others, and files named ``whole``.

    Of suites a quarter of the files, as the tests of a file share what they start; whole models share nothing.
    """
    costs = Costs.read()

    def waits(item: pytest.Item) -> bool:
        file = file_of(item)
        if tier.starts_suites:
            return not has_turn(item.nodeid if file.startswith(MODELS) else file, part)
        case_s = costs.of_case(file, function_of(item))
        return case_s > TURN_S and not has_turn(item.nodeid, part)

    return [item for item in rest if file_of(item) in whole or not waits(item)]


class ByFolder(LoadScopeScheduling):
    """Hands out files to processes of pytest-xdist; of ``tests/system``, whole folders, as their files share suites."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file.rpartition("/")[0] if file.startswith("tests/system/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFolder:
    """Hand out tests by ``ByFolder``."""
    return ByFolder(config, log)


def quick_tests(items: Sequence[pytest.Item], part: int, whole: set[str]) -> set[pytest.Item]:
    """The tests of the quick tier: those of files named ``whole``, and of others what costs allow."""
    costs = Costs.read()
    by_function: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[file_of(item), function_of(item)].append(item)
    found: set[pytest.Item] = set()
    for (file, function), cases in by_function.items():
        if file in whole:
            found.update(cases)
        if file in whole or file.startswith(ON_CHANGE):
            continue
        by_id = {case.nodeid: case for case in cases}
        values = {case.nodeid: values_of(case) for case in cases}
        found.update(by_id[i] for i in chosen(values, costs.of_case(file, function), part))
    return found


def file_of(item: pytest.Item) -> str:
    """The path of a test's file from the root."""
    return item.path.relative_to(ROOT).as_posix()


def function_of(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("::")[2].partition("[")[0]


def values_of(item: pytest.Item) -> Values:
    """The values of a test's parameters, by name; equal values are one, as are others that are one object."""
    spec = getattr(item, "callspec", None)
    return (
        frozenset((name, _key(value)) for name, value in spec.params.items())
        if spec
        else frozenset()
    )


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write down what a test took, of the clock and of the CPU."""
    if (covered := coverage.Coverage.current()) is not None:
        covered.switch_context(item.nodeid)
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    try:
        return (yield)
    finally:
        record = {
            "file": file_of(item),
            "function": function_of(item),
            "id": item.nodeid,
            "clock_s": round(time.perf_counter() - began_s, 4),
            "cpu_s": round(_cpu_s() - cpu_s, 4),
        }
        _record(item.config, record)


def _record(config: pytest.Config, record: dict[str, Any]) -> None:
    """Add a line to the records, where they are asked for."""
    if config.option.tier_records:
        with config.option.tier_records.open("a") as file:
            file.write(json.dumps(record) + os.linesep)
