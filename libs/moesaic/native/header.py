"""Reads ``calls.h``: the names and types of the structs and functions that Python and C share."""

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HEADER = Path(__file__).parent / "sources/calls.h"

_SCALARS: Mapping[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"^struct (\w+) \{([^}]*)\};", re.MULTILINE)
_FUNCTION = re.compile(r"^EXPORT ([^(]*\W)(\w+)\(([^)]*)\)\s*[;{]", re.MULTILINE)
_QUALIFIERS = re.compile(r"\b(?:const|volatile)\b")


class Declared(NamedTuple):
    """A name with its C type."""

    name: str
    base: str  # a scalar's name, or ``struct`` and the struct's
    stars: int  # how many pointers lead to it

    def ctype(self, structs: Mapping[str, type[ctypes.Structure]]) -> Any:
        """Find the type for ctypes; an array of numbers is an address."""
        struct = structs.get(self.base.removeprefix("struct ")) if " " in self.base else None
        if struct is None and not self.stars:
            return _SCALARS[self.base]
        found: Any = struct or ctypes.c_void_p
        for _ in range(self.stars if struct else self.stars - 1):
            found = ctypes.POINTER(found)
        return found


class Function(NamedTuple):
    """The prototype of an exported function."""

    result: Declared
    parameters: tuple[Declared, ...]


def read_structs(text: str) -> dict[str, tuple[Declared, ...]]:
    """Read the fields of every struct in a header."""
    return {
        name: tuple(field for line in body.split(";") if line.strip() for field in _declared(line))
        for name, body in _STRUCT.findall(_COMMENT.sub("", text))
    }


def read_functions(text: str) -> dict[str, Function]:
    """Read the prototypes of all exported functions, declared in a header or defined in a source."""
    return {
        name: Function(
            _declared(f"{result} {name}")[0],
            tuple(
                found
                for parameter in parameters.split(",")
                if parameter.strip() != "void"
                for found in _declared(parameter)
            ),
        )
        for result, name, parameters in _FUNCTION.findall(_COMMENT.sub("", text))
    }


@cache
def structs() -> dict[str, tuple[Declared, ...]]:
    """Read the structs of ``calls.h``, once."""
    return read_structs(HEADER.read_text())


@cache
def functions() -> dict[str, Function]:
    """Read the functions of ``calls.h``, once."""
    return read_functions(HEADER.read_text())


def _declared(line: str) -> list[Declared]:
    """Read the names of one declaration, as in ``const float *cos, *sin``."""
    words = _QUALIFIERS.sub(" ", line).replace("*", " * ").split()
    base = " ".join(words[:2]) if words[0] == "struct" else words[0]
    names = " ".join(words[len(base.split()) :]).split(",")
    return [Declared(name.split()[-1], base, name.count("*")) for name in names]
