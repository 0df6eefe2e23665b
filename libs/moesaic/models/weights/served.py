"""The model of a worker, before anything of it is loaded."""

import time
from typing import TypeVar

import structlog
import torch

from moesaic.errors import UnusableSettings
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import numbers_for
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.hub import OnBytes, local_model
from moesaic.native.library import require_library
from moesaic.settings import ModelSettings

log = structlog.get_logger()

TOLD_EVERY_S = 15.0
Settings = TypeVar("Settings", bound=ModelSettings)


def held_dtype(settings: ModelSettings, config: ModelConfig) -> torch.dtype:
    """Return the dtype of weights in memory; see ``numbers_for``."""
    dtype: torch.dtype = getattr(torch, numbers_for(settings, config).dtype)
    return dtype


def with_own_dtype(settings: Settings, config: ModelConfig) -> Settings:
    """Return ``settings`` with the dtype that weights will have in memory, to be shown to others."""
    dtype = str(held_dtype(settings, config)).removeprefix("torch.")
    return settings.model_copy(update={"dtype": dtype})


def find_served_model(settings: ModelSettings) -> tuple[ModelConfig, Checkpoint]:
    """Read a model's configuration and the heads of its files, and let torch have its threads.

    Call it before anything listens: a bad directory should fail at once. A model of the hub is
    downloaded first, unless it is in the cache.

    Raises:
        MoesaicError: the directory holds no model that can be served so, or there is none.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    _require_devices(settings)
    directory = local_model(settings.model, on_bytes=_log_now_and_then(settings.model))
    config = load_config(directory)
    checkpoint = Checkpoint.of_model(directory, config)
    if settings.quantization != "none":
        require_library("--quantization")
    return config, checkpoint


def _require_devices(settings: ModelSettings) -> None:
    """Refuse a GPU that this process does not see, its own or one of the ranks that it starts."""
    if settings.device == "cpu":
        return
    first = torch.device(settings.device).index or 0
    elsewhere = getattr(settings, "tensor_parallel_address", "")
    ranks = 1 if elsewhere else getattr(settings, "tensor_parallel", 1)
    there = torch.cuda.device_count()
    if first + ranks > there:
        last = f" to cuda:{first + ranks - 1}" if ranks > 1 else ""
        raise UnusableSettings(
            "device",
            f"cuda:{first}{last} is needed, this process sees {there} GPUs: give another --device, fewer ranks "
            "(--tensor-parallel), or more GPUs to this process (CUDA_VISIBLE_DEVICES, or those of its container)",
        )


def _log_now_and_then(model: str) -> OnBytes:
    told_s = time.monotonic() - TOLD_EVERY_S

    def on_bytes(done: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TOLD_EVERY_S:
            told_s = time.monotonic()
            log.info("model.downloading", model=model, bytes=done, total_bytes=total)

    return on_bytes
