"""Models that fill a GPU, of random weights: Qwen3-30B-A3B in bfloat16 and gpt-oss-20b in MXFP4, served over REST.

Their files, 61 and 13 GB with all layers, are drawn on the device. They are written to the shared memory if it has
room, else to the directory for temporary files.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common.models import (
    GPT_OSS_20B,
    MXFP4_BYTES,
    QWEN3_30B,
    tensor_shapes,
    write_model,
)
from benchmarks.common.suite import DEMO, running_suite
from benchmarks.engine.bench import EngineWorkload
from benchmarks.serving import ON_GPU, client_of, rates
from moesaic.cli.terminal.outcome import CommandError, Exit

WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 64),
    EngineWorkload("generation_64", 64, 128, 64),
    EngineWorkload("prefill", 16, 2048, 1),
)
ARMS = {
    "local": ("--topology", "local"),
    "disaggregated": ("--topology", "disaggregated", "--experts", "1"),
}
SETTINGS = {
    "MOESAIC_DTYPE": "bfloat16",
    "MOESAIC_KV_BLOCKS": "4096",
    "MOESAIC_MAX_NUM_BATCHED_TOKENS": "8192",
}
GIB = 1 << 30


@dataclass(frozen=True)
class WideModel:
    """A model's published shape, and the layers of it that ``--quick`` has."""

    config: Mapping[str, Any]
    quick_layers: int


MODELS = {"qwen3-30b-a3b": WideModel(QWEN3_30B, 8), "gpt-oss-20b": WideModel(GPT_OSS_20B, 6)}


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Serve each model in both arms, with all its layers, and tell after each; ``quick``: with few."""
    if not torch.cuda.is_available():
        raise CommandError(
            "wide needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    return _served(quick, 1 if quick else 3)


def _served(quick: bool, rounds: int) -> Iterator[dict[str, Any]]:
    # Needs triton
    from benchmarks.kernels.bench import Timer, gemm_rate

    peak = gemm_rate(Timer(20))
    torch.cuda.empty_cache()
    figures: dict[str, Any] = {"gemm_bf16_tflops": round(peak / 1e12, 1)}
    for name, model in MODELS.items():
        found: dict[str, Any] = {}
        layers = model.quick_layers if quick else model.config["num_hidden_layers"]
        figures[f"{name}, {layers} layers"] = found
        for _ in _measured({**model.config, "num_hidden_layers": layers}, peak, rounds, found):
            yield _result(figures, rounds)


def _result(figures: dict[str, Any], rounds: int) -> dict[str, Any]:
    failed = [
        f"{model}, {arm}"
        for model, arms in figures.items()
        if isinstance(arms, dict)
        for arm, figure in arms.items()
        if arm == "error" or (isinstance(figure, dict) and "error" in figure)
    ]
    return {
        "config": {"device": torch.cuda.get_device_name(), "rounds": rounds},
        "figures": figures,
        "notes": [
            "tokens/s over REST, medians of the rounds: generated ones, their prompts in the time; prefill: of prompts",
            "share_of_gemm_rate: operations of linear layers for the prompts over the rate of a large product",
            "device_gib: memory of the device that the suite took, KV of 65,536 tokens included",
            "disaggregated: attention and experts share the GPU, under MPS if the session says so",
        ],
        "failed": f"not measured: {', '.join(failed)}" if failed else None,
    }


def _measured(
    config: Mapping[str, Any], peak: float, rounds: int, figures: dict[str, Any]
) -> Iterator[None]:
    """Fill in the figures of one model, and yield after each arm; what it could not do is its result."""
    nbytes = sum(_nbytes(name, shape) for name, shape in tensor_shapes(config))
    place = roomiest(nbytes)
    if place is None:
        figures["error"] = f"no directory has room for {nbytes / GIB:.0f} GiB"
        yield
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-", dir=place) as name:
        started = time.perf_counter()
        write_model(Path(name), config, tokenizer=DEMO, seed=11, device="cuda")
        figures["made_s"] = round(time.perf_counter() - started, 1)
        torch.cuda.empty_cache()
        for arm, flags in ARMS.items():
            try:
                figures[arm] = _arm(Path(name), flags, config, peak, rounds)
            # The other arm and model may still be measured, whatever this was.
            except Exception as error:
                figures[arm] = {"error": f"{type(error).__name__}: {error}"[-400:]}
            yield


def _arm(
    model: Path, flags: Sequence[str], config: Mapping[str, Any], peak: float, rounds: int
) -> dict[str, Any]:
    free, _ = torch.cuda.mem_get_info()
    started = time.perf_counter()
    with (
        running_suite("--model", str(model), *flags, **ON_GPU, **SETTINGS) as suite,
        client_of(suite) as client,
    ):
        start_s = round(time.perf_counter() - started, 1)
        taken = free - torch.cuda.mem_get_info()[0]
        found = rates(client, model.name, WORKLOADS, torch.Generator().manual_seed(5), rounds)
    share = found["prefill"] * linear_operations(config) / peak
    return {
        "start_s": start_s,
        "device_gib": round(taken / GIB, 1),
        **found,
        "share_of_gemm_rate": round(share, 3),
    }


def _nbytes(name: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (1 if name.endswith(tuple(MXFP4_BYTES)) else 2)


def roomiest(nbytes: int) -> str | None:
    """Find the directory for large files: shared memory, which no disk slows down, or the one with most free space.

    Args:
        nbytes: size of the files.

    Returns:
        None if there is too little space in each.
    """
    shared = "/dev/shm"
    free = {
        place: shutil.disk_usage(place).free
        for place in (tempfile.gettempdir(), shared)
        if Path(place).is_dir()
    }
    # It is the host's memory, which the suite needs, too.
    free[shared] = min(free.get(shared, 0), psutil.virtual_memory().available // 2)
    best = shared if free[shared] > 1.1 * nbytes else max(free, key=lambda place: free[place])
    return best if free[best] > 1.1 * nbytes else None


def linear_operations(config: Mapping[str, Any]) -> int:
    """Count the operations of one prompt token in linear layers: attention's, the gate and the chosen experts."""
    hidden = config["hidden_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    # Queries and output, keys and values.
    width = config["num_attention_heads"] + config["num_key_value_heads"]
    attention = 2 * width * config["head_dim"] * hidden
    chosen = 3 * config["num_experts_per_tok"] * size * hidden
    return int(2 * config["num_hidden_layers"] * (attention + chosen + experts * hidden))
