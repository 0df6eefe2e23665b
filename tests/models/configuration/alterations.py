"""Altered configurations of every family, made from the fields of its class in transformers.

An alteration is a whole ``config.json``. Transformers reads it and makes a random model of it; our layers read the same
file and that model's weights.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.parity.cases import prompt_of
from benchmarks.parity.configurations import BASES, CLASSES, COMMON

PROMPT = prompt_of(24, seed=1)
# Fields of older versions and of published files, beside those of the dataclasses.
OLDER: dict[str, list[Any]] = {
    "rope_theta": [100.0],
    "partial_rotary_factor": [0.5, 1.0],
    "rotary_dim": [8],
    "original_max_position_embeddings": [16],
    "head_dim": [8],
    "torch_dtype": ["bfloat16"],
    "per_layer_config": [{"1": {"num_experts_per_tok": 1}}],
    "layer_types": [["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2],
    "moe_layer_freq": [1, 2],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "num_nextn_predict_layers": [0, 1],
    "ep_size": [1],
    "aux_loss_alpha": [0.01],
    "seq_aux": [True],
    "use_qk_norm": [True, False],
    "use_routing_bias": [True],
    "qk_norm_type": ["per_layer"],
    "use_mtp": [False],
    "attention_bias": [True],
    "mlp_bias": [True],
    "use_bias": [True],
    "qkv_bias": [False],
    "clip_qkv": [0.5],
    "sliding_window": [5, None],
    "use_sliding_window": [True],
    "max_window_layers": [1],
    "swiglu_limit": [1.0],
    "swiglu_alpha": [0.5],
    "shared_expert_intermediate_size": [0, 16],
    "experts_per_token": [1],
    "initial_context_length": [16],
    "rope_scaling_factor": [2.0],
    "norm_topk_prob": [True, False],
    "mlp_only_layers": [[1]],
    "logits_scaling": [2.0],
    "residual_multiplier": [0.5],
    "final_logit_softcapping": [5.0],
    "attn_logit_softcapping": [5.0],
    "attention_multiplier": [0.5],
    "query_pre_attn_scalar": [4],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    _LLAMA3,
    _YARN,
    {"rope_type": "yarn", "factor": 8.0},
]
# Every field that transformers knows in a rope group, and some that it does not.
_OF_ROPES: dict[str, list[Any]] = {
    "rope_theta": [50.0],
    "partial_rotary_factor": [0.5, 1.0],
    "factor": [0.5, 1.0, 3, None],
    "original_max_position_embeddings": [16, 300],
    "attention_factor": [0.5, 2.0, None],
    "beta_fast": [4, None],
    "beta_slow": [2.0, None],
    "short_factor": [[2.0] * 6],
    "long_factor": [[2.0] * 6],
    "low_freq_factor": [2.0],
    "high_freq_factor": [8.0],
    "mscale": [0.7, 0.0, None],
    "mscale_all_dim": [1.3, 0, None],
    "truncate": [False, True],
    "mrope_section": [[2, 2, 2]],
    "alpha": [1000.0],
    "finetuned": [True],
    "type": ["yarn"],
}
_BY_NAME: dict[str, list[Any]] = {
    "hidden_act": ["silu", "swish", "gelu", "relu"],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "num_key_value_heads": [1, 2, 4, 3, None],
    "num_attention_heads": [2, 6, 8],
    "head_dim": [8, 12, 16, 15, None],
    "num_hidden_layers": [1, 2, 4],
    "num_experts_per_tok": [1, 3, 8, 9, None],
    "moe_k": [1, 4, 8, 9],
    "first_k_dense_replace": [0, 2, 3, 5],
    "mlp_only_layers": [[], [0], [0, 2], [1, 7], [0, 1, 2]],
    "decoder_sparse_step": [2, 3, 4],
    "moe_layer_start_index": [0, 2, 3],
    "moe_layer_end_index": [0, 1, 2, 5],
    "moe_layer_interval": [2, 3],
    "layer_types": [
        ["full_attention"] * 3,
        ["sliding_attention"] * 3,
        ["sliding_attention", "full_attention", "full_attention"],
    ],
    "n_group": [1, 2, 4, 8, 3, None],
    "topk_group": [1, 2, 4, 5, None],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", None],
    "q_lora_rank": [16, None, 0],
    "sliding_window": [5, 1, None, 300],
    "max_window_layers": [0, 1, 2],
    "rms_norm_eps": [1e-3, 1e-9],
    "eos_token_id": [3, [3, 5], None],
    "max_position_embeddings": [32, 4096],
    "vocab_size": [100, 128],
    "swiglu_limit": [0.5, 1.0],
    "clip_qkv": [0.3, 2.0],
    "tie_word_embeddings": [True, False],
    "moe_norm_min": [0.5, 1e-12],
}
_ODD = (None, 0, 1, 0.5, True, "x")
# With these options, fields have an effect that have none in the smallest model.
_RICH: dict[str, dict[str, Any]] = {
    "mixtral": {"head_dim": 12, "sliding_window": 5},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
    },
    "qwen3_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "mlp_only_layers": [1],
        "attention_bias": True,
    },
    "deepseek_v2": {
        "q_lora_rank": 16,
        "attention_bias": True,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "attention_bias": True,
        "rope_interleave": False,
        "num_experts_per_tok": 3,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "olmoe": {"clip_qkv": 0.6, "norm_topk_prob": True, "attention_bias": True},
    "granitemoe": {"attention_bias": True, "tie_word_embeddings": True},
    "granitemoeshared": {"attention_bias": True, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_norm_min": 0.7},
    "minimax_m2": {"num_experts_per_tok": 4, "num_key_value_heads": 1},
    "gpt_oss": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {"head_dim": 12},  # some rotations of transformers fail without it
}


@dataclass(frozen=True)
class Alteration:
    """One ``config.json`` of a family: the file of a small model, or of one with more options, and its changes."""

    family: str
    name: str
    changes: dict[str, Any]
    rich: bool = False
    odd: bool = False  # of a type or size that is invalid for the field

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"

    @property
    def file(self) -> dict[str, Any]:
        """The whole file."""
        whole = {**base(self.family, rich=self.rich), **self.changes}
        return {name: value for name, value in whole.items() if value is not ...}


def base(family: str, *, rich: bool = False) -> dict[str, Any]:
    """Return the file that a family's class writes for the smallest model, or for one with more options."""
    options = _OF_FAMILY.get(family, {}) | (_RICH[family] if rich else {})
    written = config_class(family)(**{**COMMON, **BASES[family], **options}).to_dict()
    return dict(json.loads(json.dumps(written)))


def config_class(family: str) -> Any:
    """The class in transformers."""
    return getattr(transformers, CLASSES[family][0])


def alterations(family: str) -> Iterator[Alteration]:
    """List all alterations of a family, in a fixed order."""
    told, more = base(family), base(family, rich=True)
    yield Alteration(family, "as written", {})
    yield Alteration(family, "as version 4 writes it", older(told))
    yield Alteration(family, "rich", {}, rich=True)
    yield Alteration(family, "rich, as version 4 writes it", older(more), rich=True)
    for rich, of in ((False, told), (True, more)):
        for odd, values in ((False, _values_of), (True, _odd_values_of)):
            for name, value in values(family, of):
                shown = f"{'rich, ' * rich}{name} = {value!r}"
                yield Alteration(family, shown, {name: value}, rich, odd)
    for group in _groups(told):
        shown = {k: v for k, v in group.items() if k != "rope_theta"}
        yield Alteration(family, f"rope_parameters = {shown}", {"rope_parameters": group})
        changes = older(told | {"rope_parameters": group})
        yield Alteration(family, f"rope_scaling = {shown}", changes)


def older(told: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that version 4 of transformers writes differently."""
    group = dict(told["rope_parameters"])
    theta, part = group.pop("rope_theta", 1e4), group.pop("partial_rotary_factor", ...)
    kind = group.pop("rope_type", "default")
    group = {"type": kind} | group if kind != "default" else {}
    changes = {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": group or None}
    if part is not ...:
        changes["partial_rotary_factor"] = part
    return {**changes, "dtype": ..., "torch_dtype": "float32"}


def _values_of(family: str, told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    cls = config_class(family)
    names = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, default in names.items():
        value = told.get(name, default)
        if name != "rope_parameters":
            others = _BY_NAME.get(name, _others(value))
            yield from ((name, other) for other in others if other != value)
            large = isinstance(default, int) and default > 8  # such a large model cannot be made
            if name in told and not large and name != "num_experts_per_tok":
                yield name, ...
    for name, meant in cls.attribute_map.items():
        yield from ((name, told.get(meant)), (name, 4))
    for name, values in OLDER.items():
        yield from ((name, value) for value in values if name not in names)
    for size in (16, 64):
        group = {**told["rope_parameters"], "rope_type": "yarn", "factor": 4.0}
        group["original_max_position_embeddings"] = size
        yield "rope_parameters", group


def _odd_values_of(family: str, told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config_class(family)):
        value = told.get(field.name, field.default)
        for odd in () if field.name == "rope_parameters" else _ODD:
            if odd != value or type(odd) is not type(value):
                yield field.name, odd


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1]
    if isinstance(value, float):
        return [value * 2, value / 2, 0.0]
    return []


def _groups(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    theta = told["rope_parameters"]["rope_theta"]
    part = told["rope_parameters"].get("partial_rotary_factor")
    more = {"rope_theta": theta} | ({"partial_rotary_factor": part} if part else {})
    for group in _ROPES:
        yield more | group
        for name, values in _OF_ROPES.items():
            yield from (more | group | {name: value} for value in values)


def reference(alteration: Alteration, directory: Path) -> Tensor | None:
    """Make the model that transformers reads of an alteration, in ``directory``; return its logits.

    None: transformers has none, since it refuses the file, or fails with the prompt.
    """
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    told = json.dumps(alteration.file)
    logits: Tensor | None = None
    with (
        warnings.catch_warnings(),
        suppress(Exception),
    ):  # any error means that there is no reference
        warnings.simplefilter("ignore")
        model = _model(alteration.family, json.loads(told))
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT]), return_dict=True).logits[0].float()
        model.save_pretrained(directory)
    (directory / "config.json").write_text(told)
    return logits if logits is not None and bool(logits.isfinite().all()) else None


def _model(family: str, told: dict[str, Any]) -> Any:
    config = config_class(family).from_dict(told)
    torch.manual_seed(7)
    model = getattr(transformers, CLASSES[family][1])(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias", "sinks")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.2)
    return model
