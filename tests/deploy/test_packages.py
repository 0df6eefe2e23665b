"""The wheel and the source archive: the services lie within the library, and nowhere else."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.suites import ROOT

LINK = ROOT / "libs" / "moesaic" / "services"
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="builds need hatchling"
)


def built(what: str, source: Path, into: Path) -> Path:
    """Build a wheel or a source archive as pip does, without a network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(into)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return into / done.stdout.split()[-1]


def copied(into: Path) -> Path:
    """Copy what a package is made of; links stay links."""
    into.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, into)
    for name in ("libs", "services"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, into / name, symlinks=True, ignore=ignored)
    return into


def modules_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name}


def test_the_library_has_the_services_by_a_link_that_moves_with_it() -> None:
    assert LINK.is_symlink()
    assert str(LINK.readlink()) == "../../services"
    assert LINK.resolve() == ROOT / "services"


def test_only_the_library_is_packed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["libs/moesaic"]
    for command in project["project"]["scripts"].values():
        module, _, function = command.partition(":")
        path = ROOT / "libs" / Path(*module.split(".")).with_suffix(".py")
        assert f"\ndef {function}(" in path.read_text(encoding="utf-8")


@needs_hatchling
def test_wheels_of_the_tree_and_of_the_source_archive_have_every_service(tmp_path: Path) -> None:
    tree = copied(tmp_path / "copy")
    of_tree = modules_in(built("wheel", tree, tmp_path / "tree"))
    with tarfile.open(built("sdist", tree, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("moesaic-*/")
    of_archive = modules_in(built("wheel", unpacked, tmp_path / "archive"))

    services = {
        f"moesaic/services/{path.relative_to(ROOT / 'services')}"
        for path in (ROOT / "services").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name.partition("/")[0] for name in of_tree} == {"moesaic"}
    assert services <= of_tree
    assert of_archive == of_tree
