"""Puts faults of one line into the sources, one at a time, and counts how many a tier of tests finds.

``python -m tests.tiers.mutants --coverage .coverage``, after ``make test ARGS=--coverage``: only the tests that ran
the line are tried. The sources that are changed are those of a copy.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage

from tests.tiers.reached import ROOT

ROOMS = (
    "libs/moesaic/engine",
    "libs/moesaic/dispatch",
    "libs/moesaic/experts",
    "libs/moesaic/placement",
    "services/gateway",
)
LIMIT_S = 900  # a fault that makes tests hang is found, too
COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One line of a file with other text between two columns."""

    path: str
    line: int
    begin: int
    end: int
    text: str

    def put_into(self, folder: Path) -> str:
        """Write the fault into the copy at ``folder``; gives back the line as it is now."""
        file = folder / self.path
        lines = file.read_bytes().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.begin] + self.text.encode() + line[self.end :]
        file.write_bytes(b"".join(lines))
        return lines[self.line - 1].decode().strip()


def faults_in(path: Path) -> Iterator[Fault]:
    """All faults that this tool knows of the functions of a file."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                text = _changed(node, source)
                if (
                    text is not None
                    and isinstance(node, ast.expr)
                    and node.lineno == node.end_lineno
                ):
                    end = node.end_col_offset or 0
                    yield Fault(name, node.lineno, node.col_offset, end, text)


def _changed(node: ast.AST, source: str) -> str | None:
    """The text of an expression with a fault in it; None: none is known."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{text(left)} {COMPARED[type(op)]} {text(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            return f"({text(left)}) {COMPUTED[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=[first, *others]):
            other = " and " if isinstance(op, ast.Or) else " or "
            return "(" + other.join(map(text, [first, *others])) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({text(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({text(orelse)} if {text(test)} else {text(body)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
    return None


def tests_of(fault: Fault, covered: coverage.CoverageData) -> list[str]:
    """The tests that run a line, by what coverage has seen."""
    contexts = covered.contexts_by_lineno(str(ROOT / fault.path)).get(fault.line, [])
    return sorted({context for context in contexts if context})


def is_found(folder: Path, tests: list[str]) -> bool:
    """True if one of ``tests`` fails in the copy at ``folder``."""
    names = folder / "tests-of-a-fault"
    names.write_text("\n".join(tests), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'libs'}:{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"@{names}"]
    try:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode != 0


def main() -> None:
    """Draw faults, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.mutants")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int, default=40)
    arguments = parser.parse_args()
    covered = coverage.CoverageData(str(arguments.coverage))
    covered.read()
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    faults = dict.fromkeys(fault for file in files for fault in faults_in(file))
    drawn = random.Random(arguments.seed).sample(list(faults), arguments.mutants)
    found = 0
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "run")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        tried = sorted({test for fault in drawn for test in tests_of(fault, covered)})
        if is_found(folder, tried):
            raise SystemExit("tests fail without a fault: run make coverage again, or mend them")
        for number, fault in enumerate(drawn, 1):
            tests = tests_of(fault, covered)
            line = fault.put_into(folder)
            is_hit = bool(tests) and is_found(folder, tests)
            shutil.copyfile(ROOT / fault.path, folder / fault.path)
            found += is_hit
            verdict = "found" if is_hit else "MISSED"
            print(
                f"{number:>3} {verdict:<6} {len(tests):>5} tests  {fault.path}:{fault.line}  {line}",
                flush=True,
            )
    print(f"{found} of {len(drawn)} found, seed {arguments.seed}")


if __name__ == "__main__":
    main()
