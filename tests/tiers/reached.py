"""Finds the files of tests that a change reaches by imports."""

import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGES = ("moesaic", "moesaic_lab", "benchmarks", "models", "tests")
# Files that no import names, by how their paths begin: the module that a change of them changes, or tests.
BEHIND = {
    "libs/moesaic/native/sources/": "moesaic.native.library",
    "tests/native/": "tests.native.sanitized",
    "protos/": "moesaic.v1",
    "docs/": "tests.deploy.test_docs",
    "mkdocs.yml": "tests.deploy.test_docs",
    "deploy/": "tests.deploy.test_files",
    "compose": "tests.deploy.test_files",
    "README.md": "tests.deploy.test_docs",
    "CHANGELOG.md": "tests.deploy.test_docs",
    "libs/moesaic_lab/pyproject.toml": "tests.deploy.test_packages",
    "pyproject.toml": "tests.deploy.test_packages",
}


def git(*arguments: str) -> list[str]:
    """The lines that a command of git prints; none where there is no repository."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []


def changed_since(revision: str | None) -> list[str]:
    """Paths that differ from ``revision``, committed or not.

    Args:
        revision: None takes what the upstream branch and this one have in common, or ``HEAD``.
    """
    if revision is None:
        common = git("merge-base", "HEAD", "@{upstream}")
        revision = common[0] if common else "HEAD"
    elif not git("rev-parse", "--verify", f"{revision}^{{commit}}"):
        raise SystemExit(f"SINCE={revision} is not a commit of this repository")
    new = git("ls-files", "--others", "--exclude-standard")
    return [*git("diff", "--name-only", revision), *new]


def reached_by(paths: list[str]) -> set[str]:
    """Files of tests that import what lies at ``paths``, directly or through other modules."""
    if not paths:
        return set()
    graph = graph_of_imports()
    changed = {module for path in paths if (module := module_of(path)) in graph.modules}
    tests = set(changed)
    for module in changed:
        tests |= graph.find_downstream_modules(module)
    files = (Path(*module.split(".")).with_suffix(".py") for module in tests)
    return {file.as_posix() for file in files if file.name.startswith("test_")}


def module_of(path: str) -> str:
    """The module that a changed file changes; empty: none that is known."""
    behind = [module for beginning, module in BEHIND.items() if path.startswith(beginning)]
    if not path.endswith(".py"):
        return behind[0] if behind else ""
    parts = Path(path).with_suffix("").parts
    parts = parts[1:] if parts[0] == "libs" else parts
    parts = ("moesaic", *parts) if parts[0] == "services" else parts
    return ".".join(parts).removesuffix(".__init__")


def graph_of_imports() -> grimp.ImportGraph:
    """The graph of all modules; tests import the ``conftest`` modules above them."""
    for folder in (ROOT, ROOT / "libs"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for module in [m for m in graph.modules if m.startswith("tests.")]:
        above = module.split(".")[:-1]
        for depth in range(1, len(above) + 1):
            conftest = ".".join([*above[:depth], "conftest"])
            if conftest in graph.modules and conftest != module:
                graph.add_import(importer=module, imported=conftest)
    return graph
