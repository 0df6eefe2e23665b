"""The configurations that parity with transformers is checked on: tiny models, every option of every family."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.local import LocalDispatcher
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
VOCAB_SIZE = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # small weights would make all logits alike and any answer right
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass(frozen=True)
class ParityCase:
    """One configuration of a family's class in transformers.

    ``options`` differ from the family's base. ``file`` changes fields of the saved file; ``...`` leaves a field out.
    """

    family: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


_CLASSES = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
}
_BASES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 40, "num_local_experts": 6},
    "qwen2_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "num_experts": 8,
    },
    "qwen3_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "head_dim": 16,
    },
    "deepseek_v2": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 20,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
}
CASES = [
    ParityCase("mixtral", "base"),
    ParityCase(
        "mixtral",
        "tied embeddings, one key-value head",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    ParityCase("mixtral", "wide heads, no grouping", {"head_dim": 20, "num_key_value_heads": 4}),
    ParityCase("mixtral", "sliding window", {"sliding_window": 11}),
    ParityCase(
        "mixtral",
        "left out of the file: rms_norm_eps, rotation",
        file={"rms_norm_eps": ..., "rope_parameters": ..., "tie_word_embeddings": ...},
    ),
    ParityCase("mixtral", "top 1 of 3", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    ParityCase("qwen2_moe", "base"),
    ParityCase(
        "qwen2_moe",
        "normalised, no bias, tied",
        {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    ParityCase(
        "qwen2_moe", "dense layers named", {"mlp_only_layers": [0], "num_experts_per_tok": 4}
    ),
    ParityCase(
        "qwen2_moe",
        "every second layer sparse",
        {"decoder_sparse_step": 2, "num_key_value_heads": 4},
    ),
    ParityCase("qwen3_moe", "base"),
    ParityCase(
        "qwen3_moe",
        "normalised, tied",
        {"norm_topk_prob": True, "tie_word_embeddings": True, "num_experts_per_tok": 4},
    ),
    ParityCase(
        "qwen3_moe",
        "biased, dense mix",
        {"attention_bias": True, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    ParityCase("qwen3_moe", "yarn", {"rope_parameters": _YARN}),
    ParityCase(
        "qwen3_moe",
        "yarn as older files spell it",
        {"rope_parameters": _YARN},
        {
            "rope_parameters": ...,
            "rope_theta": _YARN["rope_theta"],
            "rope_scaling": {
                "type": "yarn",
                **{k: v for k, v in _YARN.items() if not k.startswith("rope_")},
            },
        },
    ),
    ParityCase("qwen3_moe", "sliding window", {"use_sliding_window": True, "sliding_window": 9}),
    ParityCase("deepseek_v2", "base"),
    ParityCase(
        "deepseek_v2",
        "query compression, all sparse",
        {"q_lora_rank": 16, "first_k_dense_replace": 0},
    ),
    ParityCase("deepseek_v2", "biased", {"q_lora_rank": 16, "attention_bias": True}),
    ParityCase("deepseek_v2", "biased, no query compression", {"attention_bias": True}),
    ParityCase(
        "deepseek_v2",
        "yarn with mscale",
        {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.1}},
    ),
    ParityCase(
        "deepseek_v2",
        "left out of the file: n_shared_experts, gate",
        file=dict.fromkeys(("n_shared_experts", "topk_method", "routed_scaling_factor"), ...),
    ),
    ParityCase("deepseek_v2", "yarn without mscale", {"rope_parameters": _YARN}),
    ParityCase(
        "deepseek_v2",
        "group-limited, scaled",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 3,
        },
    ),
    ParityCase(
        "deepseek_v2",
        "greedy, scaled, wide values",
        {"routed_scaling_factor": 1.7, "v_head_dim": 24, "n_shared_experts": 1},
    ),
]


def build_reference(case: ParityCase, directory: Path, **save_options: Any) -> Any:
    """Make the case's random model with transformers, save it to ``directory`` and return it, in eval mode."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[case.family])
    torch.manual_seed(7)
    model = model_class(config_class(**{**_COMMON, **_BASES[case.family], **case.options})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("norm.weight", ".bias")
        ):  # made as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
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
