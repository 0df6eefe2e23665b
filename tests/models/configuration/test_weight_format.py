"""``quantization_config`` as published models have it."""

from typing import Any

import pytest

from moesaic.kernels.held_bytes import WeightForm
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.weight_format import WeightFormat, read_weight_format

_BLOCKS = WeightFormat("fp8", 8, 128, 128, "weight_scale_inv")


def scheme(layout: str, **weights: Any) -> dict[str, Any]:
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None,
            "observer": "minmax",
            "observer_kwargs": {},
            "symmetric": True,
            **weights,
        },
    }
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


PUBLISHED: dict[str, tuple[dict[str, Any], WeightFormat, WeightForm | None]] = {
    "Qwen3-30B-A3B-FP8": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        _BLOCKS,
        WeightForm("fp8", 128),
    ),
    "DeepSeek-V3.1": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        _BLOCKS,
        WeightForm("fp8", 128),
    ),
    "gpt-oss-20b": (
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        WeightFormat("mxfp4", 4, 32, attention=False),
        WeightForm("int4", 32, levels=True),
    ),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["gate"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        WeightFormat("awq", 4, 128, scale="scales", zeros=True),
        WeightForm("int4", 128, zeros=True),
    ),
    "Qwen3-30B-A3B-GPTQ-Int4": (
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "lm_head": False,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
        },
        WeightFormat("gptq", 4, 128, scale="scales", zero_offset=1),
        WeightForm("int4", 128),
    ),
    "Mixtral-8x7B-Instruct-v0.1-GPTQ": (
        {
            "bits": 4,
            "damp_percent": 0.1,
            "desc_act": True,
            "group_size": -1,
            "model_file_base_name": "model",
            "model_name_or_path": None,
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
        WeightFormat("gptq", 4, None, scale="scales", zero_offset=1),
        WeightForm("int4", 128),
    ),
    "the same in groups, ordered by activation": (
        {"bits": 4, "desc_act": True, "group_size": 128, "quant_method": "gptq", "sym": False},
        WeightFormat("gptq", 4, 128, scale="scales", zeros=True, zero_offset=1, ordered=True),
        None,
    ),
    "Qwen3-30B-A3B-quantized.w4a16": (
        scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        WeightFormat("pack-quantized", 4, 128),
        WeightForm("int4", 128),
    ),
    "the same with zero points": (
        scheme(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=128,
            symmetric=False,
            actorder="weight",
        ),
        WeightFormat("pack-quantized", 4, 128, zeros=True),
        WeightForm("int4", 128, zeros=True),
    ),
    "the same in 8 bits": (
        scheme("pack-quantized", num_bits=8, type="int", strategy="channel"),
        WeightFormat("pack-quantized", 8, None),
        None,
    ),
    "Qwen3-30B-A3B-FP8-dynamic": (
        scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
        WeightFormat("fp8", 8, None),
        WeightForm("fp8", 128),
    ),
    "the same in blocks": (
        scheme(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
        ),
        WeightFormat("fp8", 8, 128, 128),
        WeightForm("fp8", 128),
    ),
    "Mixtral-8x7B-Instruct-v0.1-FP8": (
        {
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.layers.0.block_sparse_moe.gate"],
            "quant_method": "fp8",
        },
        WeightFormat("fp8", 8, None, None),
        WeightForm("fp8", 128),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_say_what_their_weights_are(name: str) -> None:
    fields, expected, held = PUBLISHED[name]

    found = read_weight_format(Fields("config.json", {"quantization_config": fields}))

    assert found == expected
    assert found.held == held


def test_plain_models_say_nothing() -> None:
    assert read_weight_format(Fields("config.json", {})) is None


@pytest.mark.parametrize(
    ("group", "held"), [(None, 128), (256, 128), (128, 128), (64, 64), (96, 32), (16, None)]
)
def test_groups_in_memory_are_parts_of_those_in_files(group: int | None, held: int | None) -> None:
    assert WeightFormat("awq", 4, group).held_group == held
    assert WeightFormat("awq", 4, group).held == (held and WeightForm("int4", held))
