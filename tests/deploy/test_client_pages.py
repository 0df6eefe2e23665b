"""The table of clients tells the versions that the tests run, and every client has a page."""

import json
import re

from tests.suites import ROOT

CLIENTS = ROOT / "tests" / "clients"
PAGES = ROOT / "docs" / "use" / "clients"
ROW = re.compile(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| ([^|]+) \|", re.MULTILINE)


def pins() -> dict[str, str]:
    """The versions of all clients, as their environments have them."""
    lines = [line for path in CLIENTS.glob("requirements*.txt") for line in path.open()]
    pinned = [line.strip().split("==") for line in lines if not line.startswith("#")]
    packages = json.loads((CLIENTS / "npm" / "package.json").read_text())["dependencies"]
    # Clients that need an older openai do not say which one is tried.
    newest = {name: version for name, version in sorted(pinned, key=_number)}
    return newest | packages


def _number(pin: list[str]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", pin[1])]


def test_versions_in_the_table_are_those_that_are_run() -> None:
    rows = ROW.findall((PAGES / "README.md").read_text())
    told = [client.split(" ") for _, versions in rows for client in versions.split(", ")]

    assert told
    known = pins()
    assert [
        (name, version, known.get(name)) for name, version in told if known.get(name) != version
    ] == []


def test_every_page_is_in_the_table_and_names_its_tests() -> None:
    pages = {path.name: path.read_text() for path in PAGES.glob("*.md") if path.name != "README.md"}
    listed = [page for page, _ in ROW.findall((PAGES / "README.md").read_text())]

    assert sorted(listed) == sorted(pages)
    assert [name for name, text in pages.items() if "\nTest: `tests/" not in text] == []


def test_every_package_of_npm_is_pinned_to_one_version() -> None:
    packages = json.loads((CLIENTS / "npm" / "package.json").read_text())["dependencies"]
    locked = json.loads((CLIENTS / "npm" / "package-lock.json").read_text())["packages"]

    for name, version in packages.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert not [name for name, package in locked.items() if "resolved" in package]
