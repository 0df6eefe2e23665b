"""Random models of every family, made by transformers, and their logits by transformers and by our layers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.configurations import (
    BASES,
    CASES,
    CLASSES,
    COMMON,
    VOCAB_SIZE,
    ParityCase,
)
from moesaic.dispatch.local import LocalDispatcher
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

__all__ = [
    "CASES",
    "CPU",
    "VOCAB_SIZE",
    "ParityCase",
    "Served",
    "build_reference",
    "local_moe",
    "prompt_of",
    "reference_greedy",
    "reference_logits",
]
CPU = torch.device("cpu")


def build_reference(case: ParityCase, directory: Path, **save_options: Any) -> Any:
    """Make the case's random model with transformers, save it to ``directory`` and return it, in eval mode."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[case.family])
    torch.manual_seed(7)
    model = model_class(config_class(**{**COMMON, **BASES[case.family], **case.options})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("norm.weight", "bias", "sinks")
        ):  # made as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # Made as zeros
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(directory, **save_options)
    if case.file:
        path = directory / "config.json"
        fields = {**json.loads(path.read_text()), **case.file}
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return model


class Served:
    """A model directory served in one process by our own layers, as a dispatcher-free yardstick."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        quantization: Quantization = "none",
    ) -> None:
        """Load the model in ``directory``."""
        self.config = load_config(directory)
        checkpoint = Checkpoint.of_model(directory, self.config)
        self.decoder = Decoder.load(checkpoint, self.config, dtype, CPU, quantization)
        self.moe = local_moe(checkpoint, self.config, dtype, quantization)
        self.cache: KVCache = self.decoder.new_kv_cache(num_blocks=64, block_size=8)

    def forward(
        self, rows: list[tuple[list[int], int, list[int]]], wanted: list[int] | None = None
    ) -> Tensor:
        """Compute logits of ``(token ids, first position, block table)`` sequences, flattened.

        They are of every row, or of the last ``wanted`` rows of each.
        """
        return asyncio.run(self.decoder.forward(self.batch(rows, wanted), self.cache, self.moe))

    @staticmethod
    def batch(
        rows: list[tuple[list[int], int, list[int]]], wanted: list[int] | None = None
    ) -> StepBatch:
        """The batch that ``forward`` computes."""
        tokens = [token for ids, _, _ in rows for token in ids]
        return StepBatch(
            token_ids=tokens,
            positions=[first + i for ids, first, _ in rows for i in range(len(ids))],
            sequence_rows=[len(ids) for ids, _, _ in rows],
            block_tables=[table for _, _, table in rows],
            wanted=[len(ids) for ids, _, _ in rows] if wanted is None else wanted,
        )

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Continue ``prompt`` with its most likely tokens, one forward pass each."""
        table = list(range(self.cache.num_blocks))
        token_ids, pending = list(prompt), list(prompt)
        for _ in range(num_tokens):
            logits = self.forward([(pending, len(token_ids) - len(pending), table)])
            pending = [int(logits[-1].argmax())]
            token_ids += pending
        return token_ids[len(prompt) :]


def local_moe(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization = "none",
) -> MoELayer:
    """Compute all routed experts in this process."""
    dispatcher = LocalDispatcher(checkpoint, config, dtype, CPU, quantization)

    async def moe(layer: int, hidden_states: Tensor) -> Tensor:
        return await dispatcher.dispatch(dispatcher.begin_step(), layer, hidden_states)

    return moe


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """The reference's float32 logits ``[T, vocab]`` over one sequence."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The reference's greedy continuation of ``prompt``."""
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
    return [int(token) for token in ids[0, len(prompt) :]]


def prompt_of(length: int, seed: int) -> list[int]:
    """Draw random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (length,), generator=generator)]
