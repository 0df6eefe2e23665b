"""Finds, compiles and loads the kernels for this machine's processor.

They share torch's OpenMP threads: a second pool of them would have both wait asleep. So nothing of
OpenMP is linked in, and its symbols are those that torch has loaded already.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()

# What a processor must have, the richest first. Named by that, so that machines of several kinds can
# share a directory.
VARIANTS: dict[str, tuple[frozenset[str], list[str]]] = {
    "avx512-vnni": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
        ["-march=x86-64-v4", "-mavx512vnni"],
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ["-march=x86-64-v4"],
    ),
    "avx2": (frozenset({"avx2", "fma", "bmi2"}), ["-march=x86-64-v3"]),
    "any": (frozenset(), []),
}
_FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-fPIC", "-fvisibility=hidden"]
_SOURCES = Path(__file__).parent
_BUILT = _SOURCES / "built"  # where images have them


class Matrix(Structure):
    """``struct matrix``."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("in", c_int64),
        ("out", c_int64),
    ]


class Expert(Structure):
    """``struct expert``."""

    _fields_ = [("gate_up", Matrix), ("down", Matrix)]


class Shape(Structure):
    """``struct shape`` of attention."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("block_stride", "head_stride", "token_stride")),
        *((name, c_int64) for name in ("value_start", "block_size", "window")),
        *((name, c_int64) for name in ("query_stride", "out_stride")),
        ("scale", c_float),
    ]


class Batch(Structure):
    """``struct batch`` of attention."""

    _fields_ = [
        *((name, c_void_p) for name in ("first_rows", "num_rows", "lengths", "block_tables")),
        ("count", c_int64),
        ("table_width", c_int64),
    ]


_P, _N = c_void_p, c_int64
_SIGNATURES = {
    "panel_width": (_N, []),
    "pack_float": (None, [_P, _N, _N, _P]),
    "pack_int8": (None, [_P, _N, _N, _P, _P]),
    "linear": (None, [POINTER(Matrix), _N, _P, _N, _N, _N, _P, _N, _N, _P, c_int]),
    "experts_scratch": (_N, [_N, _N, _N, _N, _N, c_int]),
    "experts": (
        None,
        [POINTER(POINTER(Expert)), _N, _P, _N, _N, _N, _P, _P, _N, _P, _P, c_int],
    ),
    "add_rms_norm": (None, [_P, _N, _P, _P, c_float, _N, _N, _P, _P, c_int]),
    "store_grouped": (
        None,
        [_P, _N, _N, _N, _N, _P, c_float, _P, _P, c_int, _P, _P, _N, c_int],
    ),
    "store_latent": (
        None,
        [_P, _N, _P, c_float, _P, _N, _P, _P, c_int, _N, _N, _N, _P, _P],
    ),
    "rotate_heads": (None, [_P, _N, _N, _N, _N, _N, _P, _P, c_int, _P, _N, _N]),
    "select_experts": (None, [_P, _N, _N, _N, c_int, c_float, _P, _P, c_int]),
    "attention_scratch": (_N, [POINTER(Shape), POINTER(Batch), c_int]),
    "attention": (None, [POINTER(Shape), POINTER(Batch), _P, _P, _P, _P, c_int]),
}


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where they cannot be had, and torch computes instead. Says so once."""
    try:
        return load(_find(this_variant()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning(
            "kernels.native_missing", cause=detail.strip()[-500:], fix="install gcc for full speed"
        )
        return None


def load(path: Path) -> ctypes.CDLL:
    """Load the kernels from ``path``; raises ``OSError``."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def usable(tensor: Tensor) -> bool:
    """Whether the kernels compute with ``tensor``."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and library() is not None


def lib() -> ctypes.CDLL:
    """The kernels, where ``usable`` has said that there are any."""
    loaded = library()
    assert loaded is not None
    return loaded


_mine = threading.local()


def scratch(size: int) -> int:
    """The address of ``size`` bytes that are this thread's until it asks again."""
    kept: Tensor | None = getattr(_mine, "scratch", None)
    if kept is None or kept.nbytes < size + 64:
        kept = _mine.scratch = torch.empty(size + 64, dtype=torch.uint8)
    return -(-kept.data_ptr() // 64) * 64


def this_variant() -> str:
    """The richest variant that this processor can run."""
    return next(name for name in VARIANTS if can_run(name))


def can_run(variant: str) -> bool:
    """Whether this processor has what ``variant`` needs."""
    return VARIANTS[variant][0] <= _processor_flags()


@cache
def _processor_flags() -> frozenset[str]:
    if os.uname().machine != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split())
    return frozenset()


def compile_into(directory: Path, variant: str) -> Path:
    """Compile ``variant``; the file appears whole or not at all.

    Raises:
        OSError: there is no compiler, or the directory cannot be written.
        CalledProcessError: the compiler failed; ``stderr`` says why.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise OSError("there is no C compiler")
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _name(variant)
    flags = [*_FLAGS, *VARIANTS[variant][1]]
    with tempfile.TemporaryDirectory(dir=directory) as work:
        sources = sorted(str(source) for source in _SOURCES.glob("*.c"))
        for arguments in (
            [*flags, "-c", *sources],
            ["-shared", "-o", target.name, *(f"{Path(source).stem}.o" for source in sources)],
        ):
            subprocess.run(
                [compiler, *arguments], cwd=work, check=True, capture_output=True, text=True
            )
        os.replace(Path(work) / target.name, target)
    return target


def _find(variant: str) -> Path:
    name = _name(variant)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"
    for directory in (_BUILT, home):
        if (directory / name).exists():
            return directory / name
    return compile_into(home, variant)


@cache
def _name(variant: str) -> str:
    """Names what was compiled, so that no process ever loads another version's."""
    digest = hashlib.sha256(repr((_FLAGS, VARIANTS[variant])).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return f"kernels-{variant}-{digest.hexdigest()[:16]}.so"
