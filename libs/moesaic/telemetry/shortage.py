"""The shortage of memory, in all forms in which Python, the system, torch and CUDA report it.

| allocator | error |
|---|---|
| Python's | ``MemoryError`` |
| the system's, for mapped memory | ``OSError`` with ``ENOMEM`` |
| torch's of a GPU | ``torch.OutOfMemoryError``, a ``RuntimeError`` |
| torch's of the CPU | ``RuntimeError``, by its text alone |
| CUDA's, of pinned memory | ``torch.AcceleratorError`` or ``RuntimeError``, by its text alone |
| cuBLAS's and cuDNN's, of a GPU | ``RuntimeError`` with their status |
"""

import errno
import re

from moesaic.errors import Overloaded

_TEXTS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
)
_TRIED = re.compile(r"ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def ran_out_of_memory(error: BaseException) -> bool:
    """Return true if an allocation failed because there was too little memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = first_line(error).lower()
        return any(known in text for known in _TEXTS)
    return isinstance(error, MemoryError)


def refused_bytes(error: BaseException) -> int:
    """Return the bytes that an allocator says it could not give; 0 if it does not say."""
    # "Tried to allocate 2.00 MiB", "you tried to allocate 123 bytes"
    found = _TRIED.search(first_line(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; torch writes advice behind it."""
    return str(error).strip().partition("\n")[0]


def short_of_memory(error: BaseException, what: str, fix: str) -> Overloaded:
    """Make the error of work that may succeed later, or elsewhere.

    Args:
        error: what the allocator raised.
        what: the work, in words.
        fix: settings for the operator to change.
    """
    told = f"{what} ran out of memory"
    if count := refused_bytes(error):
        told += f" ({count} bytes were refused)"
    return Overloaded(f"{told}; if it repeats, {fix}")
