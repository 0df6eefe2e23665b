"""The configurations that parity with transformers is checked on: tiny models, every option of every family."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity import windows
from moesaic.dispatch.local import LocalDispatcher
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
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_GRANITE: dict[str, Any] = {
    "intermediate_size": 40,
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
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
    "deepseek_v2": _DEEPSEEK | _LATENT,
    "deepseek_v3": _DEEPSEEK | _LATENT | {"n_group": 4, "topk_group": 2},
    "glm4_moe": _DEEPSEEK | {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4}},
    "olmoe": {"intermediate_size": 40, "num_experts": 8},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 56},
    "ernie4_5_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "moe_k": 3,
        "moe_num_experts": 8,
        "tie_word_embeddings": False,
    },
    "gpt_oss": windows.GPT_OSS,
    "minimax_m2": {
        "intermediate_size": 40,
        "num_local_experts": 8,
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
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
    ParityCase("qwen3_moe", "slowed as Llama 3.1", {"rope_parameters": _LLAMA3}),
    ParityCase(
        "qwen3_moe",
        "slowed linearly",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    ParityCase(
        "qwen3_moe",
        "dynamic, within its context",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    ParityCase("deepseek_v3", "base", {"num_experts_per_tok": 3}),
    ParityCase(
        "deepseek_v3",
        "as Kimi-K2: one group, query compression",
        {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        {"model_type": "kimi_k2"},
    ),
    ParityCase(
        "deepseek_v3",
        "yarn with mscale, biased, halves",
        {
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "attention_bias": True,
            "rope_interleave": False,
        },
    ),
    ParityCase(
        "deepseek_v3",
        "not normalised, all sparse, tied",
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    ParityCase("glm4_moe", "base"),
    ParityCase(
        "glm4_moe",
        "biased, norms of heads, scaled",
        {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    ParityCase(
        "glm4_moe",
        "groups, a quarter rotated, as older files spell it",
        {
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
        {"rope_parameters": ..., "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    ParityCase(
        "glm4_moe",
        "not normalised, two dense layers, yarn",
        {
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5},
        },
    ),
    ParityCase("olmoe", "base"),
    ParityCase(
        "olmoe",
        "clipped, normalised, biased, no grouping",
        {
            "clip_qkv": 0.6,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    ParityCase("olmoe", "tied, top 4", {"tie_word_embeddings": True, "num_experts_per_tok": 4}),
    ParityCase("granitemoe", "base"),
    ParityCase("granitemoe", "biased, tied", {"attention_bias": True, "tie_word_embeddings": True}),
    ParityCase("granitemoeshared", "base"),
    ParityCase("granitemoeshared", "nothing shared", {"shared_intermediate_size": 0}),
    ParityCase("ernie4_5_moe", "base"),
    ParityCase(
        "ernie4_5_moe",
        "tied, every second layer up to the second, nothing shared",
        {
            "tie_word_embeddings": True,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 1,
            "moe_num_shared_experts": 0,
        },
    ),
    ParityCase(
        "ernie4_5_moe",
        "sums bounded, all sparse",
        {"moe_norm_min": 0.7, "moe_layer_start_index": 0},
    ),
    ParityCase("minimax_m2", "base"),
    ParityCase(
        "minimax_m2",
        "as its file spells it, top 4",
        {"num_experts_per_tok": 4},
        {"rope_parameters": ..., "rope_theta": 5e6, "rotary_dim": 8},
    ),
    ParityCase(
        "minimax_m2",
        "whole heads, tied",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e4}},
    ),
    *(ParityCase(*each) for each in windows.CASES),
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
            ("norm.weight", "bias", "sinks")
        ):  # made as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # made as zeros
            torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(directory, **save_options)
    if case.file:
        path = directory / "config.json"
        fields = {**json.loads(path.read_text()), **case.file}
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return model


class Served:
    """A model directory served in one process by our own layers, as a dispatcher-free yardstick."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Load the model in ``directory``."""
        self.config = load_config(directory)
        checkpoint = Checkpoint.of_model(directory, self.config)
        self.decoder = Decoder.load(checkpoint, self.config, dtype, CPU)
        self.moe = local_moe(checkpoint, self.config, dtype)
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


def local_moe(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> MoELayer:
    """Compute all routed experts in this process."""
    dispatcher = LocalDispatcher(checkpoint, config, dtype, CPU)

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
