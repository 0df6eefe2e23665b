"""The kernels for this machine's processor, as Python calls them."""

import ctypes
import subprocess
import threading
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import structlog
import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.kernels.native import compile

log = structlog.get_logger()


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
        *(
            (name, c_int64)
            for name in ("block_stride", "head_stride", "token_stride", "key_stride")
        ),
        *((name, c_int64) for name in ("value_start", "value_stride", "block_size", "window")),
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


class AttentionLayer(Structure):
    """``struct layer`` of grouped-query attention."""

    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        *((name, c_void_p) for name in ("norm", "qk_norm", "norm_behind")),
        ("eps", c_float),
    ]


class AttentionStep(Structure):
    """``struct step`` of grouped-query attention."""

    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "positions", "slots")),
        ("shape", Shape),
        ("batch", Batch),
        ("count", c_int64),
        ("interleaved", c_int32),
    ]


class RoutedExperts(Structure):
    """``struct moe``."""

    _fields_ = [
        ("gate", Matrix),
        ("slots", POINTER(POINTER(Expert))),
        ("size", c_int64),
        ("top_k", c_int64),
        ("scaling", c_float),
        ("normalise", c_int32),
    ]


class WholeLayer(Structure):
    """``struct whole_layer``."""

    _fields_ = [("attention", AttentionLayer), ("moe", RoutedExperts)]


class WholeDecoder(Structure):
    """``struct decoder``."""

    _fields_ = [
        ("layers", POINTER(WholeLayer)),
        ("num_layers", c_int64),
        ("kv", Matrix),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        ("layers_done", c_void_p),
    ]


class WholeStep(Structure):
    """``struct whole_step``."""

    _fields_ = [
        ("all", AttentionStep),
        ("tokens", c_void_p),
        ("attending", c_void_p),
        ("last", AttentionStep),
    ]


_P, _N = c_void_p, c_int64
_SIGNATURES = {
    "panel_width": (_N, []),
    "vector_width": (_N, []),
    "pack_float": (None, [_P, _N, _N, _P]),
    "pack_int8": (None, [_P, _N, _N, _P, _P]),
    "linear": (None, [POINTER(Matrix), _N, _P, _N, _N, _N, _P, _N, _N, _P, c_int]),
    "experts_scratch": (_N, [_N, _N, _N, _N, _N, c_int]),
    "experts": (
        None,
        [POINTER(POINTER(Expert)), _N, _P, _N, _N, _N, _P, _P, _N, _P, _P, c_int],
    ),
    "sum_of_choices": (None, [_P, _N, _N, _P, _P, _N, _P, c_int]),
    "add_rms_norm": (None, [_P, _N, _P, _P, c_float, _N, _N, _P, _P, c_int]),
    "store_grouped": (
        None,
        [_P, _N, _N, _N, _N, _P, c_float, _P, _P, _P, c_int, _P, _P, _N, _N, c_int],
    ),
    "store_latent": (
        None,
        [_P, _N, _P, c_float, _P, _N, _P, _P, c_int, _N, _N, _N, _P, _P],
    ),
    "rotate_heads": (None, [_P, _N, _N, _N, _N, _N, _P, _P, c_int, _P, _N, _N]),
    "select_experts": (None, [_P, _N, _N, _N, c_int, c_float, _P, _P, c_int]),
    "choose_experts": (
        None,
        [POINTER(Matrix), _P, _N, _N, c_int, c_float, _P, _P, _P, c_int],
    ),
    "schedule_experts_scratch": (_N, [_N, _N]),
    "schedule_experts": (
        None,
        [_P, _N, _P, _N, _N, _P, _P, _P, _P, c_int32, c_int32, _P, _P, _P, _P],
    ),
    "grouped_query_scratch": (_N, [POINTER(AttentionLayer), POINTER(AttentionStep), c_int]),
    "grouped_query_layer": (
        None,
        [POINTER(AttentionLayer), POINTER(AttentionStep), _P, _P, _P, _P, _P, _P, c_int],
    ),
    "decoder_step_scratch": (_N, [POINTER(WholeDecoder), POINTER(WholeStep), c_int]),
    "decoder_step": (
        None,
        [POINTER(WholeDecoder), POINTER(WholeStep), POINTER(_P), _P, _P, c_int],
    ),
    "attention_scratch": (_N, [POINTER(Shape), POINTER(Batch), c_int]),
    "attention": (None, [POINTER(Shape), POINTER(Batch), _P, _P, _P, _P, c_int]),
}


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where they cannot be had, and torch computes instead. Says so once."""
    try:
        return load(compile.find(compile.this_variant()))
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


def require_library(flag: str) -> None:
    """Refuse ``flag`` where there are no kernels; raises ``InvalidInput``."""
    if library() is None:
        raise InvalidInput(
            flag, "needs the kernels for CPUs, which a C compiler makes: install gcc"
        )


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
