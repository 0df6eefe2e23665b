"""A source and the header of its name are a unit; units include and call one another in one direction."""

import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from moesaic.native.header import HEADER

SOURCES = HEADER.parent
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|(?<!include )"[^"\n]*"')
INCLUDED = re.compile(r'#include "(?:\w+/)*(\w+)\.h"')
DEFINED = re.compile(r"^(?!static\b|INLINE\b)\w[\w *]*\b(\w+)\([^;{}()]*\)\s*\{", re.MULTILINE)
CALLED = re.compile(r"(?<![\w.>])(\w+)\(")


def texts() -> Iterator[tuple[Path, str]]:
    """Every source and header but ``calls.h``, which declares the functions of all units."""
    for path in sorted(SOURCES.rglob("*.[ch]")):
        if path != HEADER:
            yield path, COMMENT_OR_TEXT.sub("", path.read_text())


def uses() -> dict[str, set[str]]:
    """The units that each unit includes or calls, or declares functions of."""
    unit_of = {
        name: path.stem
        for path, text in texts()
        if path.suffix == ".c"
        for name in DEFINED.findall(text)
    }
    found: dict[str, set[str]] = {}
    for path, text in texts():
        called = {unit_of[name] for name in CALLED.findall(text) if name in unit_of}
        found.setdefault(path.stem, set()).update(INCLUDED.findall(text), called)
    return {unit: others - {unit} for unit, others in found.items()}


def test_units_have_no_cycle() -> None:
    found = uses()

    TopologicalSorter(found).prepare()  # raises CycleError, which names the units

    assert {"ring", "answer", "pool"} <= found["ask"]  # it has read includes and calls
