"""A process that loads one model and says what it took; arguments: model, ``local`` or ``experts``, quantisation."""

import ctypes
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.dispatch.local import LocalDispatcher
from moesaic.experts.host import ExpertHost
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.native.library import library
from moesaic.native.memory import HugePages

CPU = torch.device("cpu")
DTYPE = torch.float32


def main() -> None:
    """Load, and print the figures as JSON."""
    model, way, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    quantization: Quantization = "int8" if name == "int8" else "none"
    config = load_config(model)
    library()
    # The peak begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _resident("VmRSS"), time.perf_counter()
    held = _load(model, config, way, quantization)
    seconds = time.perf_counter() - began
    ctypes.CDLL(None).malloc_trim(0)
    peak, final = _resident("VmHWM") - before, _resident("VmRSS") - before
    del held
    began = time.perf_counter()
    HugePages().zeros((final,), torch.uint8).fill_(1)
    zeros_s = time.perf_counter() - began
    found = {
        "seconds": round(seconds, 3),
        "zeros_s": zeros_s,
        "final_mb": final >> 20,
        "peak_over_final": round(peak / final, 3),
    }
    print(json.dumps(found))


def _load(model: Path, config: ModelConfig, way: str, quantization: Quantization) -> object:
    checkpoint = Checkpoint.of_model(model, config)
    if way == "local":
        decoder = Decoder.load(checkpoint, config, DTYPE, CPU, quantization)
        return decoder, LocalDispatcher(checkpoint, config, DTYPE, CPU, quantization)
    num_experts, layers = config.moe.num_experts, list(config.moe_layers)
    host = ExpertHost(checkpoint, config, "w", num_experts, DTYPE, CPU, quantization)
    worker = placed_worker("w")
    placement = placement_of(
        [worker], [list(range(num_experts))], layers, num_experts, model_digest=config.digest
    )
    host.loader.prepare(placement)
    return host


def _resident(key: str) -> int:
    """Bytes that ``/proc/self/status`` has under ``key``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


if __name__ == "__main__":
    main()
