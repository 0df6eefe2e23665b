"""What a ``config.json`` leaves out, says twice or says in vain, against the configuration classes of transformers."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import LatentAttention, ModelConfig, load_config

CLASSES: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "gpt_oss": transformers.GptOssConfig,
}
# With these every field of the family counts.
OPTIONS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gpt_oss": {},
}
NO_EFFECT = {  # on the logits of one forward pass, whatever they say
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "use_cache"),
    *("id2label", "label2id", "problem_type", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("initializer_range", "attention_dropout", "router_jitter_noise"),  # of training
    *("output_router_logits", "router_aux_loss_coef"),  # of the loss
    *("pad_token_id", "bos_token_id", "pretraining_tp"),
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
    "num_attention_heads": 128,
    "eos_token_id": 5,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    "per_layer_config": {"1": {"num_experts_per_tok": 1}},
    "first_k_dense_replace": 1,
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
    config = CLASSES[family](**OPTIONS[family])
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    made_of_others = ("layer_types", "head_dim") if family not in ("mixtral", "gpt_oss") else ()
    return {name: value for name, value in fields.items() if name not in made_of_others} | {
        "model_type": family
    }


def read_or_refused(load: Load, fields: dict[str, Any]) -> ModelConfig | CheckpointError:
    """What comes of a file."""
    try:
        return load(fields)
    except CheckpointError as error:
        return error


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
        "num_attention_heads": attention.num_heads,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "expert_size": moe.expert_size,
        "sparse": list(config.moe_layers),
        "dense_size": config.dense_size,
    }
    if isinstance(attention, LatentAttention):
        names = (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        return (
            found
            | {name: getattr(attention, name) for name in names}
            | {
                "attention_bias": attention.bias,
                "shared_size": moe.shared_expert_size,
                "routed_scaling_factor": moe.routed_scaling_factor,
                "topk_method": moe.topk_method,
            }
        )
    return found | {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "windows": [attention.window_of(layer) for layer in range(config.num_layers)],
        "qkv_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "norm_topk_prob": moe.norm_topk_prob,
        "shared_size": moe.shared_expert_size,
        "activation": moe.activation and (moe.activation.slope, moe.activation.limit),
    }


def of_theirs(family: str, config: Any) -> dict[str, Any]:
    """The same of the class's, read as its model reads it."""
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "num_attention_heads", "num_experts_per_tok"),
    )
    ends = config.eos_token_id
    found = {name: getattr(config, name) for name in names} | {
        "eos_token_id": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_type": config.rope_parameters["rope_type"],
    }
    layers = range(config.num_hidden_layers)
    if family == "deepseek_v2":
        names = (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        names = (*names, "attention_bias", "routed_scaling_factor", "topk_method")
        return (
            found
            | {name: getattr(config, name) for name in names}
            | {
                "num_experts": config.n_routed_experts,
                "expert_size": config.moe_intermediate_size,
                "sparse": [i for i in layers if i >= config.first_k_dense_replace],
                "dense_size": config.intermediate_size,
                "shared_size": config.n_shared_experts * config.moe_intermediate_size,
            }
        )
    is_mixtral, is_qwen2 = family in ("mixtral", "gpt_oss"), family == "qwen2_moe"
    types = getattr(config, "layer_types", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = config.qkv_bias if is_qwen2 else getattr(config, "attention_bias", False)
    return found | {
        "num_experts": config.num_local_experts if is_mixtral else config.num_experts,
        "expert_size": config.intermediate_size if is_mixtral else config.moe_intermediate_size,
        "sparse": [
            i
            for i in layers
            if is_mixtral
            or (i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0)
        ],
        "dense_size": 0 if is_mixtral else config.intermediate_size,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "windows": [
            config.sliding_window if not types or types[i] == "sliding_attention" else None
            for i in layers
        ],
        "qkv_bias": bias,
        "output_bias": bias and not is_qwen2,
        "norm_topk_prob": True if is_mixtral else config.norm_topk_prob,
        "shared_size": config.shared_expert_intermediate_size if is_qwen2 else 0,
        "activation": (config.swiglu_alpha, config.swiglu_limit) if family == "gpt_oss" else None,
    }


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
