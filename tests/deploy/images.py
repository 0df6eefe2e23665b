"""What the image of each service holds, by its Dockerfile, and what its processes can import, by the sources."""

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import grimp
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.suites import ROOT

OURS = "moesaic"
SERVICES = f"{OURS}.services"
# Packages that an image does without, and how.
DISPENSABLE = {
    "rich": "help is plain text without it",
    "triton": "kernels of GPUs: the build argument EXTRAS=cuda, or a torch for CUDA, brings it",
}
# The same of one image: what can be imported there, but is called by others alone.
UNUSED = {"edge-agent": {"scipy"}}  # policies are the scheduler's
_STAGE = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)
_INSTALLED = re.compile(r"pip install .*?\.(?:\[([a-z,]+))?\]?['\" ]")
_COPIED = re.compile(r"^COPY services/(\w+) ", re.MULTILINE)
_STARTED = re.compile(r'"-m", "([\w.]+)"')


@dataclass(frozen=True)
class Image:
    """One target of the Dockerfile, with all that it has from the targets before it.

    Attributes:
        extras: of pyproject.toml that it installs.
        services: that it has the code of.
        starts: modules that it runs.
    """

    extras: frozenset[str]
    services: frozenset[str]
    starts: frozenset[str]


@cache
def images() -> dict[str, Image]:
    """Read the images of services, by their names."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    parts = _STAGE.split(text)[1:]
    stages: dict[str, Image] = {}
    for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        before = stages.get(base, Image(frozenset(), frozenset(), frozenset()))
        extras = {
            extra for found in _INSTALLED.findall(body) for extra in found.split(",") if extra
        }
        stages[name] = Image(
            before.extras | extras,
            before.services | set(_COPIED.findall(body)),
            before.starts | set(_STARTED.findall(body)),
        )
    return {name: image for name, image in stages.items() if image.services}


@cache
def graph() -> grimp.ImportGraph:
    """The imports of all our modules, in functions too; those for types alone are none."""
    return grimp.build_graph(
        OURS, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


@cache
def _may_name() -> re.Pattern[str]:
    """Where a source may name a module that is no part of Python; most need not be parsed."""
    tops = {module.partition(".")[0] for module in graph().modules} - sys.stdlib_module_names
    return re.compile(rf"""["']({"|".join(map(re.escape, tops))})\b|iter_modules""")


@cache
def _named_in(module: str) -> frozenset[str]:
    """The modules that a module names in texts, to import them or to start a process; or itself."""
    path = ROOT / "libs" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    if not _may_name().search(text):
        return frozenset()
    tree = ast.parse(text)
    # A text that is only compared with others starts nothing.
    compared = {node.left for node in ast.walk(tree) if isinstance(node, ast.Compare)}
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in compared
    }
    found = texts & graph().modules
    if any(
        isinstance(node, ast.Attribute) and node.attr == "iter_modules" for node in ast.walk(tree)
    ):
        found |= graph().find_descendants(module)
    return frozenset(found)


def imported_by(starts: frozenset[str]) -> frozenset[str]:
    """All modules that processes can import that begin with these, others' top packages among them."""
    reached: set[str] = set()
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        if not module.startswith(OURS):
            continue
        parents = [module.rpartition(".")[0]] if "." in module else []
        main = [f"{module}.__main__"] if f"{module}.__main__" in graph().modules else []
        direct = graph().find_modules_directly_imported_by(module)
        waiting += [*parents, *(main if module in starts else []), *direct, *_named_in(module)]
    return frozenset(reached)


def others(modules: frozenset[str]) -> set[str]:
    """Those of the modules that come from other projects than ours and Python itself."""
    tops = {module.partition(".")[0] for module in modules}
    return {top for top in tops if top != OURS and top not in sys.stdlib_module_names}


@cache
def distributions_of(extras: frozenset[str]) -> frozenset[str]:
    """All projects that an installation of ours with these extras has, as those here require each other."""
    waiting = [(OURS, frozenset({"", *extras}))]
    found: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in found:
            continue
        found.add((name, wanted))
        for requirement in map(Requirement, _requires(name)):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted):
                more = frozenset({"", *requirement.extras})
                waiting.append((canonicalize_name(requirement.name), more))
    return frozenset(name for name, _ in found)


def _requires(name: str) -> list[str]:
    if name == OURS:  # as it is written now; what is installed may be older
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"].items()
        of_extras = [f'{each}; extra == "{extra}"' for extra, listed in optional for each in listed]
        return [*project["dependencies"], *of_extras]
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of another machine, such as those of GPUs
        return []


@cache
def projects() -> dict[str, set[str]]:
    """The projects that may have brought each top package that is installed here."""
    return {
        top: set(map(canonicalize_name, names)) for top, names in packages_distributions().items()
    }


def wanted_by(name: str) -> set[str]:
    """The packages of others that an image must have."""
    found = others(imported_by(images()[name].starts))
    return found - DISPENSABLE.keys() - UNUSED.get(name, set())


def importable(name: str) -> list[str]:
    """All modules that an image must be able to import, of ours and of others."""
    ours = {module for module in imported_by(images()[name].starts) if module.startswith(OURS)}
    return sorted(wanted_by(name) | {module for module in ours if not needs_gpu(module)})


def needs_gpu(module: str) -> bool:
    return "triton" in graph().find_modules_directly_imported_by(module)
