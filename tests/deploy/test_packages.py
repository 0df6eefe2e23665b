"""The wheels and the source archive: services lie within the library, and the lab is a package of its own."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Callable
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moesaic
from moesaic.native.compile import cache_directory
from tests.suites import ROOT
from tests.waiting import HANG_S

LINK = ROOT / "libs" / "moesaic" / "services"
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def built(what: str, source: Path, into: Path) -> Path:
    """Build a wheel or a source archive as pip does, without a network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(into)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
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


def test_wheels_of_the_tree_and_of_the_source_archive_have_every_service(
    wheels: dict[str, Path], archive: Path, tmp_path: Path
) -> None:
    of_tree = modules_in(wheels["moesaic"])
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The product and the lab as wheels, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    tree = copied(folder / "copy")
    return {
        "moesaic": built("wheel", tree, folder),
        "moesaic_lab": built("wheel", tree / "libs" / "moesaic_lab", folder),
    }


@pytest.fixture(scope="module")
def sites(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each wheel unpacked, by name. The first to import a module leaves it compiled to the others."""
    found = {name: tmp_path_factory.mktemp(name) for name in wheels}
    for name, folder in found.items():
        with ZipFile(wheels[name]) as packed:
            packed.extractall(folder)
    return found


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive."""
    return built("sdist", ROOT, tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a wheel; some seconds of a core, as its weights are compressed."""
    return built("wheel", ROOT / "models", tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages that are installed here, except ours."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("moesaic", "_moesaic", "__editable__")):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def base_packages(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those that ``pip install moesaic`` brings, without an extra."""
    folder, site = tmp_path_factory.mktemp("base"), Path(sysconfig.get_path("purelib"))
    (ours,) = metadata.distributions(name="moesaic", path=[str(wheels["moesaic"])])
    waiting, seen = [ours], {"moesaic"}
    while waiting:
        for requirement in map(Requirement, waiting.pop().requires or ()):
            name = canonicalize_name(requirement.name)
            if name in seen or (requirement.marker and not requirement.marker.evaluate()):
                continue
            seen.add(name)
            waiting.append(found := metadata.distribution(name))
            for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
                (folder / top).exists() or (folder / top).symlink_to(site / top)
    assert not {"torch", "fastapi"} & seen
    return folder


Installed = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(
    sites: dict[str, Path], packages: Path, base_packages: Path, tmp_path: Path
) -> Installed:
    """Run ``moesaic`` where only some of our wheels are installed, with all other packages or those of the wheel."""

    def run(
        *words: str, installed: tuple[str, ...], extras: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        ours = [tmp_path / "site", *(sites[name] for name in installed)]
        paths = [*map(str, ours), str(packages if extras else base_packages)]
        start = f"import sys; sys.path[:0] = {paths}; from moesaic.cli.main import main; main()"
        # Kernels that were compiled from the same sources are there; others take half a minute.
        cache = str(cache_directory().parent)
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", start, *words],
            cwd=tmp_path,
            env={"COLUMNS": "100", "HOME": str(tmp_path), "XDG_CACHE_HOME": cache},
            capture_output=True,
            text=True,
        )

    return run


def test_the_wheel_of_the_lab_has_all_of_it_and_nothing_else(wheels: dict[str, Path]) -> None:
    lab = ROOT / "libs" / "moesaic_lab"
    found = {
        str(path.relative_to(lab.parent))
        for path in lab.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".toml"
    }

    assert modules_in(wheels["moesaic_lab"]) == found


@pytest.mark.parametrize("name", ["simulate", "distill"])
def test_without_the_lab_its_commands_say_how_to_install_it(command: Installed, name: str) -> None:
    listed = command("--help", installed=("moesaic",))
    refused = command(name, "--help", installed=("moesaic",))

    assert listed.returncode == 0, listed.stderr
    assert "Start a suite of services" in listed.stdout
    assert name not in listed.stdout
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"moesaic: 'moesaic {name}' is a command of the package")
    assert "-e libs/moesaic_lab" in refused.stderr


def test_without_the_lab_its_policies_are_unknown(command: Installed) -> None:
    words = ("serve", "gateway", "--router-policy", "round-robin")

    refused = command(*words, "--model", "models/demo", installed=("moesaic",))

    assert refused.returncode == 2
    assert "--router-policy (MOESAIC_ROUTER_POLICY): must be one of prefix-flops" in refused.stderr


def test_with_the_lab_its_commands_are_listed_and_run(command: Installed) -> None:
    ours = ("moesaic", "moesaic_lab")

    listed = command("--help", installed=ours)
    explained = command("distill", "--help", installed=ours)
    ran = command("simulate", "elastic", "--decide-every", "1s", installed=ours)

    assert {"distill", "simulate"} <= set(listed.stdout.split())
    assert explained.returncode == 0
    assert "--joint-steps" in explained.stdout
    assert (ran.returncode, ran.stderr) == (
        2,
        "moesaic: --decide-every 1s: must be from 10s to 24h\n",
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--version",), f"moesaic {moesaic.__version__}\n"),
        (("--help",), "Start a suite of services"),
        (("up", "--help"), "Place of the experts"),
        (("serve", "attention", "--help"), "--max-num-seqs"),
    ],
)
def test_the_wheel_without_extras_explains_itself(
    command: Installed, words: tuple[str, ...], shown: str
) -> None:
    done = command(*words, installed=("moesaic",), extras=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


def test_the_wheel_without_extras_checks_the_machine(command: Installed) -> None:
    done = command("doctor", "--json", installed=("moesaic",), extras=False)

    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert (done.returncode, done.stderr) == (3, "")
    assert {"fastapi", "torch"} <= set(re.findall(r"[\w-]+", found["packages"]["detail"]))
    assert found["packages"]["fix"].endswith("'moesaic[all]'")
    assert found["torch"]["status"] == "fail"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("up",), "all"),
        (("up", "--topology", "local", "--model", "owner/name"), "all"),
        (("plan", "--model", "owner/name"), "all"),
        (("serve", "gateway", "--model", "x"), "gateway"),
        (("serve", "attention", "--model", "x"), "attention"),
        (("serve", "edge-agent", "--model", "x"), "edge-agent"),
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(
    command: Installed, words: tuple[str, ...], extra: str, tmp_path: Path
) -> None:
    refused = command(*words, installed=("moesaic",), extras=False)

    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.rstrip().endswith(f"'moesaic[{extra}]'")
    assert not (tmp_path / "run").exists()


def test_every_version_of_the_product_is_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lab = (ROOT / "libs/moesaic_lab/pyproject.toml").read_text(encoding="utf-8")

    assert project["version"] == moesaic.__version__
    assert f'version = "{moesaic.__version__}"' in lab
    assert f"]=={moesaic.__version__}" in lab


def test_without_a_clone_the_demo_model_is_a_package(
    command: Installed, demo: Path, tmp_path: Path
) -> None:
    with ZipFile(demo) as packed:
        packed.extractall(tmp_path / "site")
    (tmp_path / "demo").mkdir()  # what lies here by chance is not meant

    done = command("doctor", "--json", installed=("moesaic",))

    found = {each["name"]: each for each in json.loads(done.stdout)}
    directory = tmp_path / "site" / "moesaic_demo" / "demo"
    assert found["model"]["detail"] == f"{directory}: 32 experts, top 4"
    files = {path.name for path in (ROOT / "models/demo").iterdir()}
    assert files - {path.name for path in directory.iterdir()} == {"SAMPLES.md", "measured.json"}
    (licences,) = (tmp_path / "site").glob("moesaic_demo-*/licenses")
    assert list(licences.rglob("ATTRIBUTION.md"))


def test_the_source_archive_has_what_makes_the_wheel_without_models_and_results(
    archive: Path,
) -> None:
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}

    assert {name.partition("/")[0] for name in names} == {
        *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", ".gitignore"),
        *("constraints.txt", "deploy", "libs", "protos", "pyproject.toml"),
    }
    assert "libs/moesaic/services/gateway/main.py" in names
    assert not [name for name in names if name.startswith(("libs/moesaic_lab", "deploy/secrets"))]
    assert archive.name == f"moesaic-{moesaic.__version__}.tar.gz"
    assert archive.stat().st_size < 3 << 20


def test_packages_say_who_made_them_and_what_they_are_for(
    wheels: dict[str, Path], demo: Path
) -> None:
    for wheel in (*wheels.values(), demo):
        with ZipFile(wheel) as packed:
            (name,) = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
            told = message_from_bytes(packed.read(name))
        assert told["Author"] == "The Moesaic authors"
        assert told["License-Expression"] in ("Apache-2.0", "CC-BY-SA-4.0")
        assert all((told["Summary"], told["Keywords"], told.get_all("Classifier")))
