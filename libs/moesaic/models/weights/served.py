"""The model of a worker, before anything of it is loaded."""

from pathlib import Path

import torch

from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.native.library import require_library
from moesaic.settings import ModelSettings


def held_dtype(settings: ModelSettings, config: ModelConfig) -> torch.dtype:
    """Return the dtype of weights in memory, as ``--dtype`` says; a GPU holds none as float16."""
    name = config.dtype if settings.dtype == "auto" else settings.dtype
    if name == "float16" and settings.device != "cpu":
        name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def find_served_model(settings: ModelSettings) -> tuple[ModelConfig, Checkpoint]:
    """Read a model's configuration and the heads of its files, and let torch have its threads.

    Call it before anything listens: a bad directory should fail at once.

    Raises:
        MoesaicError: the directory holds no model that can be served so.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = load_config(Path(settings.model))
    checkpoint = Checkpoint.of_model(Path(settings.model), config)
    if settings.quantization != "none":
        require_library("--quantization")
    return config, checkpoint
