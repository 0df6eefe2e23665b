"""Reading ``config.json``: the published spellings, and complaints that name the field."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import GroupedQueryAttention, LatentAttention
from moesaic.models.configuration.config import load_config

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
    "use_sliding_window": False,
}
# And the defaults of their classes.
QWEN2: dict[str, Any] = {"model_type": "qwen2_moe"}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss"}
DEEPSEEK_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": "bfloat16",
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

WriteConfig = Callable[..., Path]


def test_qwen3_as_published(write_config: WriteConfig) -> None:
    config = load_config(write_config(QWEN3))

    assert config.attention == GroupedQueryAttention(32, 4, 128, True, False, False, None)
    assert (config.moe.num_experts, config.moe.top_k, config.moe.expert_size) == (128, 8, 768)
    assert config.moe_layers == tuple(range(48))
    assert config.kv_width == 2 * 4 * 128
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (151645,)


def test_deepseek_lite_as_published(write_config: WriteConfig) -> None:
    config = load_config(write_config(DEEPSEEK_LITE))

    assert config.attention == LatentAttention(16, None, 512, 128, 64, 128, bias=False)
    assert config.kv_width == 512 + 64
    assert config.moe_layers == tuple(range(1, 27))
    assert config.moe.shared_expert_size == 2 * 1408
    assert not config.moe.shared_expert_gated
    assert config.rope.yarn is not None
    assert config.rope.yarn.original_max_positions == 4096
    assert config.rope.yarn.rotation_scale == 1.0
    assert config.rope.softmax_scale == pytest.approx(1.2608**2, abs=1e-4)


def test_mixtral_as_published(write_config: WriteConfig) -> None:
    config = load_config(write_config(MIXTRAL))

    assert config.attention == GroupedQueryAttention(32, 8, 128, False, False, False, None)
    assert config.moe.norm_topk_prob


def test_both_spellings_of_rope_are_one(write_config: WriteConfig) -> None:
    old = load_config(write_config(DEEPSEEK_LITE))
    scaling = dict(DEEPSEEK_LITE["rope_scaling"])
    parameters = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": 10000}
    new = load_config(
        write_config(DEEPSEEK_LITE, rope_theta=..., rope_scaling=..., rope_parameters=parameters)
    )

    assert new.rope == old.rope


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (3, 5)),
    ],
)
def test_qwen_layers_are_dense_where_the_config_says(
    write_config: WriteConfig, changes: dict[str, Any], moe_layers: tuple[int, ...]
) -> None:
    config = load_config(write_config(QWEN3, num_hidden_layers=6, **changes))

    assert config.moe_layers == moe_layers
    assert config.dense_size == 6144


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (QWEN3, {"model_type": "llama"}, "config.json: model_type: 'llama' is not supported"),
        (QWEN3, {"model_type": ...}, "config.json: model_type: is missing"),
        (QWEN3, {"hidden_size": "2048"}, "hidden_size: expected an integer"),
        (QWEN3, {"num_experts": 0}, "num_experts: expected an integer of at least 1, got 0"),
        (QWEN3, {"num_experts": True}, "num_experts: expected an integer"),
        (QWEN3, {"num_experts_per_tok": 129}, "num_experts_per_tok: "),
        (QWEN3, {"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of 32"),
        (QWEN3, {"head_dim": 127}, "head_dim: rotary embedding needs an even width"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: silu"),
        (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        (QWEN3, {"rms_norm_eps": -1.0}, "rms_norm_eps: expected a positive number"),
        (QWEN3, {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number that float32"),
        (QWEN3, {"rope_theta": 10**400}, "rope_theta: expected a positive number"),
        (QWEN3, {"rope_theta": True}, "rope_theta: expected a positive number"),
        (QWEN3, {"rope_theta": math.nan}, "rope_theta: expected a positive number"),
        (QWEN3, {"rms_norm_eps": math.inf}, "rms_norm_eps: expected a positive number"),
        (QWEN3, {"num_hidden_layers": 2**64}, "num_hidden_layers: expected an integer of at most"),
        (QWEN3, {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers: expected an integer of at"),
        (QWEN3, {"num_experts": 2**31 - 1}, "num_experts: expected an integer of at most 8192"),
        (QWEN3, {"vocab_size": 2**64}, "vocab_size: expected an integer of at most 2147483647"),
        (QWEN3, {"hidden_size": 2**64}, "hidden_size: expected an integer of at most"),
        (QWEN3, {"eos_token_id": 2**64}, "eos_token_id: expected an integer or a list"),
        (MIXTRAL, {"hidden_size": 16}, "num_attention_heads: expected at most hidden_size, 16"),
        (
            DEEPSEEK_LITE,
            {"rope_theta": 1},
            "rope_theta: expected more than 1 with yarn, got 1.0",
        ),
        ({"model_type": "glm4_moe"}, {"partial_rotary_factor": 1e30}, "partial_rotary_factor: "),
        ({"model_type": "glm4_moe"}, {"partial_rotary_factor": 1e-9}, "leaves nothing to rotate"),
        ({"model_type": "granitemoe"}, {"residual_multiplier": 1e-200}, "residual_multiplier: "),
        ({"model_type": "granitemoe"}, {"residual_multiplier": 1e200}, "residual_multiplier: "),
        (QWEN3, {"hidden_act": [[[[[[[[[1]]]]]]]]]}, "hidden_act: [[[[[[[...]]]]]]] is not supp"),
        (
            QWEN3,
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.type: 'longrope' is not",
        ),
        (
            QWEN3,
            {"rope_parameters": {"rope_type": "longrope"}, "rope_theta": 1.0},
            "rope_parameters.rope_type",
        ),
        (QWEN3, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: is missing"),
        (QWEN3, {"rope_scaling": [1]}, "rope_scaling: expected an object"),
        (QWEN3, {"torch_dtype": "float64"}, "torch_dtype: 'float64' is not supported"),
        (
            QWEN3,
            {"quantization_config": {"bits": 4}},
            "quantization_config.quant_method: is missing",
        ),
        (QWEN3, {"eos_token_id": "x"}, "eos_token_id: expected an integer or a list"),
        (DEEPSEEK_LITE, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        (
            DEEPSEEK_LITE,
            {"topk_method": "group_limited_greedy", "n_group": 7},
            "n_group: expected a divisor",
        ),
        (
            DEEPSEEK_LITE,
            {"topk_method": "group_limited_greedy", "n_group": 16},
            "num_experts_per_tok: 1 of 16",
        ),
        (
            DEEPSEEK_LITE,
            {"topk_method": "group_limited_greedy", "topk_group": 2},
            "topk_group: expected at most",
        ),
        (DEEPSEEK_LITE, {"mlp_bias": True}, "mlp_bias: "),
        (DEEPSEEK_LITE, {"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
        (DEEPSEEK_LITE, {"num_experts_per_tok": ...}, "num_experts_per_tok: is missing"),
        (DEEPSEEK_LITE, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        (DEEPSEEK_LITE, {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid' is not supported"),
        (
            QWEN2,
            {"layer_types": ["sliding_attention"] * 24},
            "layer_types: has windows, but use_sliding_window",
        ),
        (GPT_OSS, {"sliding_window": None}, "sliding_window: expected an integer"),
        (GPT_OSS, {"rope_parameters": None}, "rope_parameters: is null: leave it out"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit: expected a positive number"),
        (GPT_OSS, {"layer_types": ["full_attention"] * 35}, "layer_types: expected a list of 36"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types: expected a list of 24 entries"),
        (
            QWEN2,
            {"layer_types": ["linear_attention"] * 24},
            "layer_types: 'linear_attention' is not supported; supported: sliding_attention",
        ),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": None},
            "sliding_window: expected an integer",
        ),
        (QWEN3, {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: "),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": None}}, "rope_scaling.factor: "),
        (
            QWEN3,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1000.0}},
            "rope_scaling.alpha: 1000.0 is not a known field of a rope group",
        ),
    ],
)
def test_a_field_that_cannot_be_served_is_named(
    write_config: WriteConfig, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    directory = write_config(base, **changes)

    with pytest.raises(CheckpointError) as caught:
        load_config(directory)

    assert complaint in str(caught.value)
    assert caught.value.file == "config.json"


def test_what_is_no_model_directory_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_config(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts": 8, "num_experts": 4}')
    with pytest.raises(CheckpointError, match=r"config\.json: has the key num_experts twice"):
        load_config(tmp_path)


def test_the_digest_tells_configurations_apart(write_config: WriteConfig) -> None:
    directory = write_config(QWEN3)
    before = load_config(directory)
    assert load_config(directory).digest == before.digest
    assert replace(before, weights_digest="ab").digest != before.digest

    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    with_generation = load_config(directory).digest
    path = directory / "config.json"
    path.write_text(path.read_text() + "\n")

    assert len({before.digest, with_generation, load_config(directory).digest}) == 3


def test_configuration_tokenizer_and_chat_need_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import moesaic.models.configuration.config, moesaic.models.text.tokenizer, moesaic.models.text.chat"
    )

    subprocess.run([sys.executable, "-c", script], check=True)
