"""The house rules that a machine can hold: folders, names, words, docstrings. CONTRIBUTING.md says why."""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("libs/moesaic", "libs/moesaic_lab", "services", "benchmarks")

# Words that a docstring does not begin with: neither verbs nor nouns.
NO_BEGINNING = re.compile(
    r"(who|whose|whom|what|whatever|whoever|whether|which|how|where|when|why|that|is|are|does|would"
    r"|may|has|if|by|of|in|at|with|to|for|as)\b",
    re.IGNORECASE,
)

# One word per idea: what a word must not stand for, by folder.
WORDS = [
    (r"\bslots?\b|_slots?\b|\bslots?_", "libs/moesaic/engine", "a slot holds an expert"),
    (
        r"\bslots?\b|_slots?\b|\bslots?_",
        "libs/moesaic/dispatch/two_phase",
        "a slot holds an expert",
    ),
    (r"_slots?\b|\bslots?_", "services/gateway", "a slot holds an expert"),
    (r"(?i)streamed|streaming_expert|\bfetched", "libs/moesaic/dispatch", "experts are gathered"),
    (r"(?i)streamed|fetched_expert", "services/attention", "experts are gathered"),
    (
        r"class \w*Exchange|class \w*Gathering",
        "libs/moesaic/dispatch",
        "rows meet in two phases, in rounds",
    ),
    (r"class \w*Exchange", "services", "a request has a request record"),
    (r"\bwork\.work\b", "libs/moesaic/engine", "a sequence has a task"),
    (r"class \w*Sharing", "libs/moesaic/experts", "a worker has an assignment"),
    (r"\bconductor\b|\bconducts?\b|\breckons?\b", "libs", "plain words"),
    (r"\bconductor\b|\bconducts?\b|\breckons?\b", "docs", "plain words"),
]


def python_files(*folders: str) -> list[Path]:
    found = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    link = ROOT / "libs/moesaic/services"  # the same files as in services
    return [f for f in found if not (f.is_relative_to(link) or f.parent.name == "v1")]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT / "libs" if file.is_relative_to(ROOT / "libs") else ROOT).parts
    name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
    return f"moesaic.{name}" if name.startswith("services") else name


@cache
def tree_of(file: Path) -> ast.Module:
    # A tree is many objects that stay: to look for garbage among them takes longer than to read it.
    gc.disable()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        gc.freeze()
    finally:
        gc.enable()
    return tree


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


@cache
def imports() -> dict[str, set[str]]:
    """Modules that each module imports, also for types alone and within functions."""
    files = {module_name(file): file for file in python_files(*SOURCES)}

    def known(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    found: dict[str, set[str]] = defaultdict(set)
    for module, file in files.items():
        for node in nodes_of(file):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found[module] |= {known(name) for name in names} - {"", module}
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts of more than one node, by reachability."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for after in graph.get(ahead.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    ahead.append(after)
        return seen

    reach = {node: reached(node) for node in graph}
    found = [{b for b in reach[a] if a in reach.get(b, ())} for a in graph if a in reach[a]]
    return [set(part) for part in {frozenset(part) for part in found}]


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in python_files(*SOURCES):
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module_name(file))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_two_modules_need_each_other() -> None:
    assert circles(imports()) == []


def test_no_two_rooms_need_each_other() -> None:
    """Rooms are the folders of the library and of the services; what lies at the root of one is not in any."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, needed in imports().items():
        for other in needed:
            a, b = room_of(module), room_of(other)
            if a and b and a != b:
                rooms[a].add(b)
    assert circles(rooms) == []


def room_of(module: str) -> str:
    """The folder of a module, if that folder is itself within a room; empty for modules at a root."""
    parts = module.split(".")
    if parts[0] == "benchmarks" or len(parts) < 3:
        return ""
    depth = 4 if parts[1] == "services" else 3
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def documented() -> Iterator[tuple[Path, int, str]]:
    for file in python_files(*SOURCES, "models"):
        for node in nodes_of(file):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                # The caption of a folder may ask its question.
                if text and not (isinstance(node, ast.Module) and file.name == "__init__.py"):
                    yield file, getattr(node, "lineno", 1), text


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for file, line, text in documented():
        if NO_BEGINNING.match(text):
            wrong.append(f"{file.relative_to(ROOT)}:{line} {text.splitlines()[0]}")
    assert wrong == []


@pytest.mark.parametrize(("pattern", "folder", "rule"), WORDS, ids=lambda value: str(value)[:40])
def test_a_word_means_one_thing(pattern: str, folder: str, rule: str) -> None:
    pages = (ROOT / folder).rglob("*.md") if folder == "docs" else python_files(folder)
    found = [
        f"{file.relative_to(ROOT)}:{number} {line.strip()}"
        for file in pages
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], rule


def test_every_exception_from_a_check_has_its_reason() -> None:
    exception = re.compile(r"# (noqa: [A-Z0-9, ]+|type: ignore\[[^\]]+\])(.*)$")
    bare = []
    for file in python_files(*SOURCES):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            found = exception.search(line)
            if found and len(found.group(2).strip(" #:")) < 8:
                bare.append(f"{file.relative_to(ROOT)}:{number} {line.strip()}")
    assert bare == []
