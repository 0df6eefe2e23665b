"""The kernels for this machine's processor, called by name of function and arguments."""

import ctypes
import subprocess
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.native import compile, header
from moesaic.native.structs import STRUCTS

log = structlog.get_logger()

IN_FLOATS = ("cpu",)  # devices that compute in float32 alone


class Kernels:
    """The functions of ``calls.h`` as one compiled file has them; arguments are given by name."""

    def __init__(self, path: Path) -> None:
        """Load ``path``.

        Raises:
            OSError: it cannot be loaded.
        """
        loaded = ctypes.CDLL(str(path))
        for name, (result, parameters) in header.functions().items():
            function = getattr(loaded, name)
            function.restype = result.ctype(STRUCTS)
            function.argtypes = [parameter.ctype(STRUCTS) for parameter in parameters]
            setattr(self, name, _by_name(name, [p.name for p in parameters], function))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"calls.h declares no function {name}")


def _by_name(name: str, parameters: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that takes arguments by name and passes them on in their order.

    Written out, it costs a tenth of a microsecond; by ctypes' own names of parameters a call would
    cost four of these.
    """
    order = ", ".join(parameters)
    namespace = {"function": function}
    exec(f"def {name}({'*, ' if order else ''}{order}): return function({order})", namespace)
    return namespace[name]


@cache
def library() -> Kernels | None:
    """Load the kernels, once.

    Returns:
        None if they cannot be had; torch computes instead, and one warning says so.
    """
    try:
        return Kernels(compile.find(compile.this_variant()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning(
            "kernels.native_missing", cause=detail.strip()[-500:], fix="install gcc for full speed"
        )
        return None


def computes_on(device: torch.device) -> bool:
    """Return true if the kernels compute on ``device``."""
    return device.type == "cpu" and library() is not None


def in_floats(device: torch.device) -> bool:
    """Return true if ``device`` computes in float32, whatever its weights are."""
    return device.type in IN_FLOATS


def usable(tensor: Tensor) -> bool:
    """Return true if the kernels compute with ``tensor``."""
    return tensor.dtype == torch.float32 and computes_on(tensor.device)


def require_library(flag: str) -> None:
    """Refuse ``flag`` on a machine without kernels; raises ``InvalidInput``."""
    if library() is None:
        raise InvalidInput(
            flag, "needs the kernels for CPUs, which a C compiler makes: install gcc"
        )


def lib() -> Kernels:
    """Return the kernels, after ``usable`` has said that there are any."""
    loaded = library()
    assert loaded is not None
    return loaded


_mine = threading.local()


def scratch(size: int) -> int:
    """Return the address of ``size`` bytes that are this thread's until it asks again."""
    kept: Tensor | None = getattr(_mine, "scratch", None)
    if kept is None or kept.nbytes < size + 64:
        kept = _mine.scratch = torch.empty(size + 64, dtype=torch.uint8)
    return -(-kept.data_ptr() // 64) * 64
