"""Models that fill a GPU, of random weights: Qwen3-30B-A3B in bfloat16 and gpt-oss-20b in MXFP4, served over REST.

Their files, 61 and 13 GB with all layers, are drawn on the device and written to the roomier one of the directory for
temporary files and the shared memory.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import GPT_OSS_20B, QWEN3_30B, write_model
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


def run(quick: bool) -> dict[str, Any]:
    """Serve each model in both arms, with all its layers; ``quick``: with few."""
    if not torch.cuda.is_available():
        raise CommandError(
            "wide needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    # Needs triton
    from benchmarks.kernels.bench import Timer, gemm_rate

    peak, rounds = gemm_rate(Timer(20)), 1 if quick else 3
    torch.cuda.empty_cache()
    figures: dict[str, Any] = {"gemm_bf16_tflops": round(peak / 1e12, 1)}
    for name, model in MODELS.items():
        layers = model.quick_layers if quick else model.config["num_hidden_layers"]
        figures[f"{name}, {layers} layers"] = _measured(
            {**model.config, "num_hidden_layers": layers}, peak, rounds
        )
    return {
        "config": {"device": torch.cuda.get_device_name(), "rounds": rounds},
        "figures": figures,
        "notes": [
            "tokens/s over REST, medians of the rounds: generated ones, their prompts in the time; prefill: of prompts",
            "share_of_gemm_rate: operations of linear layers for the prompts over the rate of a large product",
            "device_gib: memory of the device that the suite took, KV of 65,536 tokens included",
            "disaggregated: attention and experts share the GPU, under MPS if the session says so",
        ],
    }


def _measured(config: Mapping[str, Any], peak: float, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-", dir=roomiest()) as name:
        started = time.perf_counter()
        write_model(Path(name), config, tokenizer=DEMO, seed=11, device="cuda")
        figures["made_s"] = round(time.perf_counter() - started, 1)
        torch.cuda.empty_cache()
        for arm, flags in ARMS.items():
            free, _ = torch.cuda.mem_get_info()
            started = time.perf_counter()
            with (
                running_suite("--model", name, *flags, **ON_GPU, **SETTINGS) as suite,
                client_of(suite) as client,
            ):
                start_s = round(time.perf_counter() - started, 1)
                taken = free - torch.cuda.mem_get_info()[0]
                generator = torch.Generator().manual_seed(5)
                found = rates(client, Path(name).name, WORKLOADS, generator, rounds)
            share = found["prefill"] * linear_operations(config) / peak
            figures[arm] = {
                "start_s": start_s,
                "device_gib": round(taken / GIB, 1),
                **found,
                "share_of_gemm_rate": round(share, 3),
            }
    return figures


def roomiest() -> str:
    """Find the directory for large files with most free space."""
    places = [tempfile.gettempdir(), *(["/dev/shm"] if Path("/dev/shm").is_dir() else [])]
    return max(places, key=lambda place: shutil.disk_usage(place).free)


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
