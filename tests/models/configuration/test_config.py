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
from tests.models.configuration.test_published import DEEPSEEK_V2_LITE as LITE
from tests.models.configuration.test_published import MIXTRAL_8X7B, QWEN3_30B

QWEN3 = QWEN3_30B | {"eos_token_id": 151645}
# And the defaults of their classes.
QWEN2: dict[str, Any] = {"model_type": "qwen2_moe"}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss"}
GLM: dict[str, Any] = {"model_type": "glm4_moe"}
GRANITE: dict[str, Any] = {"model_type": "granitemoe"}
LIMITED = {"topk_method": "group_limited_greedy"}
WINDOWS = {"layer_types": ["sliding_attention"] * 24}
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
    config = load_config(write_config(LITE))

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
    config = load_config(write_config(MIXTRAL_8X7B))

    assert config.attention == GroupedQueryAttention(32, 8, 128, False, False, False, None)
    assert config.moe.norm_topk_prob


def test_both_spellings_of_rope_are_one(write_config: WriteConfig) -> None:
    old = load_config(write_config(LITE))
    scaling = dict(LITE["rope_scaling"])
    parameters = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": 10000}
    new = load_config(
        write_config(LITE, rope_theta=..., rope_scaling=..., rope_parameters=parameters)
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
        (
            MIXTRAL_8X7B,
            {"hidden_size": 16},
            "num_attention_heads: expected at most hidden_size, 16",
        ),
        (LITE, {"rope_theta": 1}, "rope_theta: expected more than 1 with yarn, got 1.0"),
        (GLM, {"partial_rotary_factor": 1e30}, "partial_rotary_factor: "),
        (GLM, {"partial_rotary_factor": 1e-9}, "leaves nothing to rotate"),
        (GRANITE, {"residual_multiplier": 1e-200}, "residual_multiplier: "),
        (GRANITE, {"residual_multiplier": 1e200}, "residual_multiplier: "),
        (QWEN3, {"hidden_act": [[[[[[[[[1]]]]]]]]]}, "hidden_act: [[[[[[[...]]]]]]] is not supp"),
        (QWEN3, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type: 'longrope' is not"),
        (QWEN3, {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
        (QWEN3, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: is missing"),
        (QWEN3, {"rope_scaling": [1]}, "rope_scaling: expected an object"),
        (QWEN3, {"torch_dtype": "float64"}, "torch_dtype: 'float64' is not supported"),
        (QWEN3, {"quantization_config": {"bits": 4}}, "quantization_config.quant_method: is miss"),
        (QWEN3, {"eos_token_id": "x"}, "eos_token_id: expected an integer or a list"),
        (LITE, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        (LITE, {**LIMITED, "n_group": 7}, "n_group: expected a divisor"),
        (LITE, {**LIMITED, "n_group": 16}, "num_experts_per_tok: 1 of 16"),
        (LITE, {**LIMITED, "topk_group": 2}, "topk_group: expected at most"),
        (LITE, {"mlp_bias": True}, "mlp_bias: "),
        (LITE, {"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
        (LITE, {"num_experts_per_tok": ...}, "num_experts_per_tok: is missing"),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        (LITE, {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid' is not supported"),
        (QWEN2, WINDOWS, "layer_types: has windows, but use_sliding_window"),
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
            "sliding_window: expected an",
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
    for directory in (tmp_path / ("x" * 300), tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a directory"):
            load_config(directory)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    for text, problem in (
        ("{", "config.json: is not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"num_experts": 8, "num_experts": 4}', "config.json: has the key num_experts twice"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=problem):
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
