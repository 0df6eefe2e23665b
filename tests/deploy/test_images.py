"""Each image can import all that its service can: no policy or mode of it fails for want of a package."""

import json
import subprocess
import sys

import pytest

from tests.deploy.images import (
    OURS,
    SERVICES,
    distributions_of,
    images,
    importable,
    imported_by,
    projects,
    wanted_by,
)

ROLES = ("gateway", "scheduler", "attention", "expert", "edge-agent")

IMPORT_ALL = """
import importlib, json, sys
modules, absent = json.load(sys.stdin)
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)
sys.meta_path.insert(0, Blocker())
for module in modules:
    importlib.import_module(module)
"""


def lacking(wanted: set[str], extras: frozenset[str]) -> set[str]:
    there = distributions_of(extras)
    return {module for module in wanted if not projects().get(module, set()) & there}


def test_every_service_has_an_image() -> None:
    assert set(images()) == set(ROLES)
    assert all(image.extras and len(image.starts) == 2 for image in images().values())


@pytest.mark.parametrize("name", ROLES)
def test_an_image_has_all_packages_that_its_service_can_import(name: str) -> None:
    assert lacking(wanted_by(name), images()[name].extras) == set()


@pytest.mark.parametrize("name", ROLES)
def test_an_image_has_the_code_of_all_services_that_its_own_imports(name: str) -> None:
    reached = imported_by(images()[name].starts)
    services = {module.split(".")[2] for module in reached if module.startswith(f"{SERVICES}.")}

    assert services == images()[name].services


@pytest.mark.parametrize(
    ("name", "extras", "missing"),
    [
        ("scheduler", set(), {"scipy"}),  # imported within a function, for the policy ``optimal``
        ("attention", {"attention"}, {"llguidance"}),  # imported within a function, too
        ("gateway", set(), {"tokenizers", "uvicorn", "fastapi"}),
    ],
)
def test_a_missing_package_would_be_found(name: str, extras: set[str], missing: set[str]) -> None:
    assert missing <= lacking(wanted_by(name), frozenset(extras))


# Some seconds for torch: no cheaper test sees what the packages themselves import.
@pytest.mark.parametrize("name", ["gateway", "scheduler", "edge-agent"])
def test_all_modules_can_be_imported_with_the_packages_of_the_image_alone(name: str) -> None:
    there = distributions_of(images()[name].extras)
    absent = [top for top, names in projects().items() if not names & there and top != OURS]

    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps([importable(name), absent]),
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")
