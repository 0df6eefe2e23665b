"""Time and memory of loading a model, against what ``cat`` of its files takes.

A random checkpoint of Qwen3-30B-A3B's width is written on the spot, with per-expert tensors in shards. Each load is a
process of its own. Beside ``cat`` stands the time to take the memory that stays, filled with zeros: on many virtual
machines memory that was never used is slower than a disk.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.models import QWEN3_30B, write_model

DTYPES = ("bfloat16", "float32")
WAYS = ("local", "experts")
QUANTIZATIONS = ("none", "int8")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 1 << 17  # as cat has it


def run(quick: bool) -> dict[str, Any]:
    """Measure; ``quick`` has a fifth of the experts, and bfloat16 alone."""
    figures: dict[str, Any] = {}
    num_experts, dtypes = (12, DTYPES[:1]) if quick else (64, DTYPES)
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as name:
            model = Path(name)
            layers = 2 if dtype == "bfloat16" else 1
            fewer = {"num_hidden_layers": layers, "num_experts": num_experts, "vocab_size": 16_384}
            write_model(model, {**QWEN3_30B, **fewer}, dtype)
            figures[dtype] = _of_model(model)
    return {
        "config": {"num_experts": num_experts, "cold": os.access(DROP_CACHES, os.W_OK)},
        "figures": figures,
        "notes": [
            "cat_of_load: seconds of cat over seconds of loading; floor_of_load: cat and taking the memory, one "
            "thread, over loading",
            "peak_over_final: most resident memory while loading over what stays, less the process before",
        ],
    }


def _of_model(model: Path) -> dict[str, Any]:
    files = sorted(model.glob("*.safetensors"))
    found: dict[str, Any] = {"file_mb": sum(file.stat().st_size for file in files) >> 20}
    for cold in (False, True) if os.access(DROP_CACHES, os.W_OK) else (False,):
        heat = "cold" if cold else "warm"
        for way in WAYS:
            for quantization in QUANTIZATIONS:
                _prepare(files, cold)
                cat_s = _cat(files)
                _prepare(files, cold)
                loaded = _load(model, way, quantization)
                floor_s = cat_s + loaded.pop("zeros_s")
                seconds = loaded["seconds"]
                found[f"{way}_{quantization}_{heat}"] = {
                    **loaded,
                    "cat_s": round(cat_s, 3),
                    "cat_of_load": round(cat_s / seconds, 3),
                    "floor_of_load": round(floor_s / seconds, 3),
                }
    return found


def _prepare(files: list[Path], cold: bool) -> None:
    if cold:
        os.sync()
        DROP_CACHES.write_text("3")
    else:
        _cat(files)


def _cat(files: list[Path]) -> float:
    began, buffer = time.perf_counter(), bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def _load(model: Path, way: str, quantization: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.loading.process", str(model), way, quantization]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
