"""What a ``config.json`` leaves out, says twice or says in vain, against the configuration classes of transformers."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.parity import configurations
from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import LatentAttention
from moesaic.models.configuration.config import ModelConfig, load_config

CLASSES = {
    family: getattr(transformers, names[0]) for family, names in configurations.CLASSES.items()
}
# With these every field of the family counts.
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True},
    "glm4_moe": {"head_dim": 128},  # no field of its own: the class takes any
    "deepseek_v2": {"num_experts_per_tok": 6},
}
NO_EFFECT = {  # on the logits of one forward pass, whatever they say
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "use_cache"),
    *("id2label", "label2id", "problem_type", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("initializer_range", "attention_dropout", "router_jitter_noise"),  # of training
    *("output_router_logits", "router_aux_loss_coef"),  # of the loss
    *("pad_token_id", "bos_token_id", "pretraining_tp"),
    "num_mtp_layers",  # they predict further tokens
}
NO_EFFECT_IN = {
    # The class has norm_topk_prob, and its model does not ask for it; groups count with another topk_method.
    "deepseek_v2": {"norm_topk_prob", "n_group", "topk_group"},
}
CHANGED: dict[str, Any] = {  # where doubling or negating is no other value
    "head_dim": 16,
    "sliding_window": 77,
    "layer_types": ["sliding_attention"],
    "max_window_layers": 3,
    "mlp_only_layers": [1],
    "num_key_value_heads": 2,
    "num_attention_heads": 256,
    "eos_token_id": 5,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    "per_layer_config": {"1": {"num_experts_per_tok": 1}},
    "first_k_dense_replace": 2,
    "moe_layer_end_index": 5,
    "shared_intermediate_size": 64,
}
FIELDS = [
    (family, field.name) for family, cls in CLASSES.items() for field in dataclasses.fields(cls)
]
COUNTING = [
    (family, name)
    for family, name in [*FIELDS, *((family, "rope_theta") for family in CLASSES)]
    if name not in NO_EFFECT | NO_EFFECT_IN.get(family, set())
]

Load = Callable[[dict[str, Any]], ModelConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a ``config.json`` and read it."""

    def load(fields: dict[str, Any]) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_config(tmp_path)

    return load


def everything(family: str) -> dict[str, Any]:
    """A file that leaves nothing out."""
    config = CLASSES[family](**OPTIONS.get(family, {}))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    has_own = family in ("mixtral", "minimax_m2", "gpt_oss")
    made_of_others = () if has_own else ("layer_types", "head_dim")
    fields = {name: value for name, value in fields.items() if name not in made_of_others}
    return {**OPTIONS.get(family, {}), **fields, "model_type": family}


def read_or_refused(load: Load, fields: dict[str, Any]) -> ModelConfig | CheckpointError:
    """What comes of a file."""
    try:
        return load(fields)
    except CheckpointError as error:
        return error


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def of_ours(config: ModelConfig) -> dict[str, Any]:
    """What decides the logits, in the words of transformers."""
    attention, moe = config.attention, config.moe
    found = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "rope_theta": config.rope.theta,
        "rope_type": "yarn" if config.rope.yarn else "default",
        "interleaved": config.rope.interleaved,
        "num_attention_heads": attention.num_heads,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "expert_size": moe.expert_size,
        "sparse": list(config.moe_layers),
        "dense_size": config.dense_size,
        "shared_size": moe.shared_expert_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "norm_least": moe.norm_least,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "groups": (moe.n_group, moe.topk_group),
        "multipliers": (config.embedding_multiplier, config.logits_scaling),
    }
    if isinstance(attention, LatentAttention):
        found |= {name: getattr(attention, name) for name in LATENT}
        return found | {"bias": attention.bias}
    return found | {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rotated": attention.rotary_dim,
        "windows": [attention.window_of(layer) for layer in range(config.num_layers)],
        "sinks": attention.sinks,
        "activation": moe.activation,
        "qk_norm": attention.qk_norm,
        "bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "clip": attention.clip,
        "scale": attention.softmax_scale,
    }


def of_theirs(family: str, config: Any) -> dict[str, Any]:
    """The same of the class's, read as its model reads it."""

    def own(*names: str, default: Any = None) -> Any:
        return next((getattr(config, name) for name in names if hasattr(config, name)), default)

    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
        *("tie_word_embeddings", "num_attention_heads", "num_experts_per_tok"),
    )
    ends, rope = config.eos_token_id, config.rope_parameters
    added = own("residual_multiplier", default=1.0)
    expert_size = own("moe_intermediate_size", "intermediate_size")
    num_shared = own("n_shared_experts", "moe_num_shared_experts", default=0)
    shared_sizes = "shared_expert_intermediate_size", "shared_intermediate_size"
    found = {name: getattr(config, name) for name in names} | {
        "rms_norm_eps": config.rms_norm_eps / added**2,
        "eos_token_id": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "rope_theta": rope["rope_theta"],
        "rope_type": rope["rope_type"],
        "interleaved": own("rope_interleave", default=family in ("deepseek_v2", "ernie4_5_moe")),
        "num_experts": own(
            "n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts"
        ),
        "expert_size": expert_size,
        "sparse": [i for i in range(config.num_hidden_layers) if is_sparse(config, i)],
        "dense_size": config.intermediate_size if hasattr(config, "moe_intermediate_size") else 0,
        "shared_size": own(*shared_sizes, default=num_shared * expert_size),
        "norm_topk_prob": family != "deepseek_v2" and own("norm_topk_prob", default=True),
        "norm_least": own("moe_norm_min", default=0.0),
        "routed_scaling_factor": own("routed_scaling_factor", default=1.0),
        "groups": (1, 1)
        if family == "deepseek_v2"
        else (own("n_group", default=1), own("topk_group", default=1)),
        "multipliers": (
            own("embedding_multiplier", default=1.0) / added,
            own("logits_scaling", default=1.0),
        ),
    }
    if hasattr(config, "kv_lora_rank"):
        found |= {name: getattr(config, name) for name in LATENT}
        return found | {"bias": config.attention_bias}
    head_dim = own("head_dim") or config.hidden_size // config.num_attention_heads
    bias = own("qkv_bias", "attention_bias", default=False)
    windowed = family in ("mixtral", "qwen3_moe")
    by_layer = family in ("qwen2_moe", "gpt_oss")
    types = config.layer_types if by_layer else [""] * config.num_hidden_layers
    return found | {
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": head_dim,
        "rotated": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "windows": [
            config.sliding_window if windowed or types[i] == "sliding_attention" else None
            for i in range(config.num_hidden_layers)
        ],
        "sinks": family == "gpt_oss",
        "activation": (config.swiglu_alpha, config.swiglu_limit) if family == "gpt_oss" else None,
        "qk_norm": own("use_qk_norm", default=family in ("qwen3_moe", "olmoe", "minimax_m2")),
        "bias": bias,
        "output_bias": bias and family not in ("qwen2_moe", "glm4_moe"),
        "clip": own("clip_qkv"),
        "scale": own("attention_multiplier", default=head_dim**-0.5),
    }


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the class's model gives a layer experts."""
    if hasattr(config, "first_k_dense_replace"):
        return bool(layer >= config.first_k_dense_replace)
    if hasattr(config, "decoder_sparse_step"):
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    if hasattr(config, "moe_layer_interval"):
        within = config.moe_layer_start_index <= layer <= config.moe_layer_end_index
        return within and (layer + 1) % config.moe_layer_interval == 0
    return True


@pytest.mark.parametrize(("family", "name"), COUNTING)
def test_what_a_file_leaves_out_is_as_the_class_has_it(load: Load, family: str, name: str) -> None:
    fields = {k: v for k, v in everything(family).items() if k != name}
    theirs = CLASSES[family](**json.loads(json.dumps(fields)))

    if theirs.num_experts_per_tok is None:
        with pytest.raises(CheckpointError, match="num_experts_per_tok: is missing"):
            load(fields)
    else:
        assert of_ours(load(fields)) == of_theirs(family, theirs)


@pytest.mark.parametrize(("family", "name"), COUNTING)
def test_a_null_is_what_it_is_in_the_class_or_refused(load: Load, family: str, name: str) -> None:
    fields = everything(family) | {name: None}

    read = read_or_refused(load, fields)

    if isinstance(read, CheckpointError):
        assert name in str(read)
    else:
        theirs = CLASSES[family](**json.loads(json.dumps(fields)))
        assert of_ours(read) == of_theirs(family, theirs)


@pytest.mark.parametrize(("family", "name"), COUNTING)
def test_no_field_that_counts_is_passed_over(load: Load, family: str, name: str) -> None:
    fields = everything(family)
    before = load(fields)
    value = fields.get(name)
    if name in CHANGED:
        changed = CHANGED[name]
    elif isinstance(value, bool):
        changed = not value
    elif isinstance(value, int | float):
        changed = value * 2
    else:
        changed = "something else"
    if name == "rope_theta":
        fields.pop("rope_parameters")
        changed = 7.0

    after = read_or_refused(load, fields | {name: changed})

    if isinstance(after, CheckpointError):
        assert name in str(after)
    else:
        same_file = {"config_digest": before.config_digest}
        assert dataclasses.replace(after, **same_file) != before


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}


@pytest.mark.parametrize(
    ("family", "twice", "both"),
    [
        ("mixtral", {"num_experts": 4}, ("num_local_experts", "num_experts")),
        ("qwen3_moe", {"num_local_experts": 4}, ("num_experts", "num_local_experts")),
        ("deepseek_v2", {"num_experts": 4}, ("n_routed_experts", "num_experts")),
        ("qwen3_moe", {"dtype": "float32", "torch_dtype": "bfloat16"}, ("dtype", "torch_dtype")),
        ("qwen3_moe", {"rope_theta": 7.0}, ("rope_parameters.rope_theta", "rope_theta")),
        ("qwen3_moe", {"rope_scaling": YARN}, ("rope_parameters", "rope_scaling")),
        (
            "qwen3_moe",
            {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 4.0}},
            ("rope_parameters", "rope_scaling"),
        ),
        (
            "qwen3_moe",
            {"rope_parameters": YARN | {"type": "default"}},
            ("rope_parameters.rope_type", "rope_parameters.type"),
        ),
        (
            "qwen3_moe",
            {
                "rope_parameters": YARN | {"original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            (
                "rope_parameters.original_max_position_embeddings",
                "but original_max_position_embeddings",
            ),
        ),
        ("deepseek_v2", {"head_dim": 128}, ("head_dim", "qk_rope_head_dim")),
        ("deepseek_v2", {"qk_head_dim": 128}, ("qk_head_dim", "qk_nope_head_dim")),
        ("deepseek_v2", {"num_key_value_heads": 4}, ("num_key_value_heads", "num_attention_heads")),
        ("deepseek_v3", {"num_local_experts": 4}, ("n_routed_experts", "num_local_experts")),
        ("ernie4_5_moe", {"num_experts_per_tok": 4}, ("moe_k", "num_experts_per_tok")),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.25},
            ("rope_parameters.partial_rotary_factor", "but partial_rotary_factor"),
        ),
        (
            "minimax_m2",
            {"rotary_dim": 64, "partial_rotary_factor": 0.25},
            ("rotary_dim", "partial"),
        ),
    ],
)
def test_what_a_file_says_twice_and_differently_is_refused(
    load: Load, family: str, twice: dict[str, Any], both: tuple[str, str]
) -> None:
    fields = everything(family) | twice

    with pytest.raises(CheckpointError) as refused:
        load(fields)

    assert all(name in str(refused.value) for name in both)


@pytest.mark.parametrize(
    ("family", "twice"),
    [
        ("mixtral", {"num_experts": 8, "torch_dtype": None}),
        ("deepseek_v2", {"num_experts": 64, "head_dim": 64, "qk_head_dim": 192}),
        ("qwen3_moe", {"rope_theta": 10000, "rope_scaling": None}),
        ("qwen3_moe", {"rope_scaling": {"type": "default"}}),
        ("qwen3_moe", {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ("qwen3_moe", {"rope_parameters": YARN, "rope_scaling": {**YARN, "type": "yarn"}}),
    ],
)
def test_what_a_file_says_twice_alike_is_taken(
    load: Load, family: str, twice: dict[str, Any]
) -> None:
    fields = everything(family) | twice

    ours = of_ours(load(fields))

    theirs = CLASSES[family](**json.loads(json.dumps(fields)))
    assert ours == of_theirs(family, theirs)
