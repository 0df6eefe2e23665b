"""Advances a simulated fleet in C: about as many events a second as a core has memory accesses for.

Imports no torch, so that ``moesaic simulate`` starts quickly and runs without it.
"""

import ctypes
import subprocess
from functools import cache
from typing import Any

import numpy as np

from moesaic.native import compile, header
from moesaic.native.structs import STRUCTS, EdgeStateArgs
from moesaic_lab.simulation.edge.state import Advance, EdgeState


@cache
def _function() -> Any:
    loaded = ctypes.CDLL(str(compile.find(compile.this_variant())))
    result, parameters = header.functions()["advance_edge"]
    function = loaded.advance_edge
    function.restype = result.ctype(STRUCTS)
    function.argtypes = [parameter.ctype(STRUCTS) for parameter in parameters]
    return function


def advance(state: EdgeState, until_s: float) -> None:
    """Carry out all events before ``until_s``, as ``moesaic_lab.simulation.edge.reference`` does.

    Raises:
        MemoryError: there is none.
        OSError, CalledProcessError: there is no compiler, or it failed.
    """
    fields = {field.name: getattr(state, field.name) for field in header.structs()["edge_state"]}
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, name
            fields[name] = value.ctypes.data if value.size else None
    if _function()(ctypes.byref(EdgeStateArgs(**fields)), ctypes.byref(ctypes.c_double(until_s))):
        raise MemoryError("no memory for a simulated fleet")


def advancer() -> Advance | None:
    """Return what advances fleets in C; None where that cannot be compiled."""
    try:
        _function()
    except (OSError, subprocess.SubprocessError):
        return None
    return advance
