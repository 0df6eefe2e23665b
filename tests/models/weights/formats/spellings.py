"""``quantization_config`` in the spellings of the tools that write such models.

A spelling takes the configuration of a form of ``benchmarks.parity.published``, and returns the one of the tool.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import transformers

from benchmarks.parity.published import FORMS, Published

Spelling = Callable[[Mapping[str, Any]], dict[str, Any]]


def _autogptq(told: Mapping[str, Any]) -> dict[str, Any]:
    """AutoGPTQ 0.7; only the first form."""
    own = {name: told[name] for name in ("bits", "group_size", "sym", "desc_act")}
    quantiser = {"damp_percent": 0.01, "static_groups": False, "true_sequential": True}
    files = {"model_name_or_path": "a/b", "model_file_base_name": "model"}
    return own | quantiser | files | {"quant_method": "gptq", "is_marlin_format": False}


def _gptqmodel(told: Mapping[str, Any]) -> dict[str, Any]:
    """GPTQModel 2."""
    meta = {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05, "mse": 0.0, "v2": False}
    return dict(told) | {"dynamic": None, "lm_head": False, "pack_dtype": "int32", "meta": meta}


def _gptqmodel_5(told: Mapping[str, Any]) -> dict[str, Any]:
    """GPTQModel 5, which names the version by ``format``, and unquantised gates by ``dynamic``."""
    own = {name: told[name] for name in ("bits", "group_size", "sym", "desc_act")}
    form = {"quant_method": "gptq", "method": "gptq", "format": told["checkpoint_format"]}
    meta = {"quantizer": ["gptqmodel:5.6.0"], "fallback": {"strategy": "rtn"}, "gptaq": None}
    return own | form | {"dynamic": {"-:.*gate": {}}, "pack_dtype": "int32", "meta": meta}


def _gptq_of_transformers_4(told: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in told.items() if name != "checkpoint_format"}
    unused = dict.fromkeys(("dataset", "tokenizer", "model_seqlen", "pad_token_id", "meta"))
    return (
        own
        | unused
        | {
            "checkpoint_format": told["checkpoint_format"],
            "backend": "auto",
            "batch_size": 1,
            "block_name_to_quantize": "model.layers",
            "cache_block_outputs": True,
            "exllama_config": {"version": 1},
            "max_input_length": None,
            "modules_in_block_to_quantize": [["self_attn.q_proj"]],
            "use_cuda_fp16": False,
            "use_exllama": True,
        }
    )


def _of_class(cls: Any, *left_out: str) -> Spelling:
    """The configuration that a class of transformers writes, without some fields."""

    def spell(told: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in told.items() if name != "quant_method"}
        written = json.loads(json.dumps(cls(**given).to_dict()))
        return {name: value for name, value in written.items() if name not in left_out}

    return spell


def _autoround(told: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound 0.5, which can write files of GPTQ version 1, with fields of later versions."""
    own = {name: told[name] for name in ("bits", "group_size", "sym", "desc_act")}
    tuning = {"iters": 200, "lr": 0.005, "nsamples": 128, "seqlen": 2048, "batch_size": 8}
    later = dict.fromkeys(("static_kv_granularity", "static_attention_granularity"), "tensor")
    gate = {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float", "group_size": 128}}
    return (
        own
        | tuning
        | later
        | {
            "quant_method": "gptq",
            "data_type": "int",
            "act_bits": 16,
            "super_bits": None,
            "quant_lm_head": False,
            "provider": "auto-round",
            "autoround_version": "0.5.1",
            "extra_config": gate,
        }
    )


def _as_told(told: Mapping[str, Any]) -> dict[str, Any]:
    return dict(told)


def _autoawq(told: Mapping[str, Any]) -> dict[str, Any]:
    return dict(told) | {"version": "GEMM", "modules_to_not_convert": None}


def _awq_of_transformers_4(told: Mapping[str, Any]) -> dict[str, Any]:
    fusing = {"do_fuse": False, "fuse_max_seq_len": None, "modules_to_fuse": None}
    return dict(told) | fusing | {"backend": "autoawq", "exllama_config": None}


def _awq_of_gptqmodel(told: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: told[name] for name in ("bits", "group_size", "quant_method", "zero_point")}
    form = {"version": "gemm", "format": "gemm", "checkpoint_format": "gemm"}
    return own | form | {"sym": False, "desc_act": False, "lm_head": False, "pack_dtype": "int32"}


def _llm_compressor(told: Mapping[str, Any]) -> dict[str, Any]:
    """llm-compressor 0.8, which writes every field of every class."""
    group = told["config_groups"]["group_0"]
    more = {"observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}
    whole = dict.fromkeys(("block_structure", "group_size", "actorder")) | more | group["weights"]
    scheme = group | {"format": told["format"], "output_activations": None, "weights": whole}
    return dict(told) | {
        "config_groups": {"group_0": scheme},
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def _sparseml(told: Mapping[str, Any]) -> dict[str, Any]:
    """compressed-tensors 0.4, with a sparsity configuration and without default values."""
    dense = {"format": "dense", "global_sparsity": 0.02, "sparsity_structure": "unstructured"}
    group = told["config_groups"]["group_0"]
    kept = {k: v for k, v in group["weights"].items() if (k, v) != ("symmetric", True)}
    return dict(told) | {
        "config_groups": {"group_0": group | {"weights": kept}},
        "sparsity_config": dense,
        "quantization_status": "frozen",
    }


def _in_other_words(told: Mapping[str, Any]) -> dict[str, Any]:
    """Spellings that compressed-tensors reads but does not write, and the older format of fp8."""
    group = told["config_groups"]["group_0"]
    weights = group["weights"] | {"type": group["weights"]["type"].upper(), "actorder": False}
    if weights.pop("strategy") == "channel":  # missing fields follow from the groups
        weights["group_size"] = -1
    layout = told["format"].replace("float-", "naive-")
    return dict(told) | {"format": layout, "config_groups": {"g": group | {"weights": weights}}}


def _fp8_of_deepseek(told: Mapping[str, Any]) -> dict[str, Any]:
    return dict(told) | {"scale_fmt": "ue8m0"}


_GPTQ: dict[str, Spelling] = {
    "AutoGPTQ": _autogptq,
    "GPTQModel 2": _gptqmodel,
    "GPTQModel 5": _gptqmodel_5,
    "transformers 4": _gptq_of_transformers_4,
    "transformers 5": _of_class(transformers.GPTQConfig),
    "transformers 5, by format": _of_class(transformers.GPTQConfig, "checkpoint_format"),
    "AutoRound": _autoround,
}
_ONE_FORM = ("AutoGPTQ", "AutoRound")  # these tools only have version 1 of GPTQ
_AWQ: dict[str, Spelling] = {
    "AutoAWQ": _autoawq,
    "transformers 4": _awq_of_transformers_4,
    "transformers 5": _of_class(transformers.AwqConfig),
    "GPTQModel": _awq_of_gptqmodel,
}
_FP8: dict[str, Spelling] = {
    "DeepSeek": _fp8_of_deepseek,
    "transformers 5": _of_class(transformers.FineGrainedFP8Config),
}
_COMPRESSED: dict[str, Spelling] = {
    "llm-compressor": _llm_compressor,
    "compressed-tensors 0.4": _sparseml,
    "other words": _in_other_words,
}
SPELLINGS: dict[str, dict[str, Spelling]] = {
    "gptq": _GPTQ,
    "awq": _AWQ,
    "fp8": _FP8,
    "compressed-tensors": _COMPRESSED,
    "mxfp4": {"transformers 5": _of_class(transformers.Mxfp4Config)},
}
SPELT: list[tuple[Published, str, Spelling]] = [
    (form, tool, spelling)
    for form in FORMS
    for tool, spelling in {"plain": _as_told, **SPELLINGS[form.fields["quant_method"]]}.items()
    if not (tool in _ONE_FORM and form.fields.get("checkpoint_format") == "gptq_v2")
]
"""Every form in the spelling of every tool that writes it."""

# Fields that change the meaning of the bytes, of other tools, versions and layouts. No supported form has them.
MEANINGFUL: dict[str, list[dict[str, Any]]] = {
    "gptq": [
        {"format": "marlin"},
        {"checkpoint_format": "bitblas"},
        {"format": "gptq_v3"},
        {"is_marlin_format": True},
        {"bits": 2},
        {"bits": 3},
        {"pack_dtype": "int8"},
        {"pack_dtype": "int16"},
        {"lm_head": True},
        {"quant_lm_head": True},
        {"dynamic": {"+:.*down_proj": {"bits": 8}}},
        {"dynamic": {".*down_proj": {"group_size": 64}}},
        {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
        {"data_type": "mx_fp"},
        {"super_bits": 6},
        {"super_group_size": 16},
        {"rotation": "hadamard"},
        {"adapter": {"name": "lora", "rank": 64}},
        {"smoothing": 0.5},
        {"zero_offset": 0},
        {"codebook": [1, 2, 3]},
    ],
    "awq": [
        {"version": "gemv"},
        {"version": "gemv_fast"},
        {"format": "llm-awq"},
        {"checkpoint_format": "marlin"},
        {"backend": "llm-awq"},
        {"zero_point": False},
        {"bits": 8},
        {"lm_head": True},
        {"dynamic": {".*": {"bits": 8}}},
        {"pack_dtype": "int8"},
        {"rotation": "random"},
        {"packing": "fast"},
    ],
    "fp8": [
        {"fmt": "e5m2"},
        {"scale_fmt": "e5m3"},
        {"expert_dtype": "fp4"},
        {"modules_to_convert": ["model.embed_tokens"]},
        {"kv_cache_scheme": "static"},
        {"weight_block_size": [128]},
        {"weight_scale_bias": 3},
        {"bias": 7},
    ],
    "compressed-tensors": [
        {"format": "marlin-24"},
        {"format": "nvfp4-pack-quantized"},
        {"format": "int-quantized"},
        {"kv_cache_scheme": {"num_bits": 8}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"rotation": {"type": "hadamard"}},
    ],
    "mxfp4": [{"rotation": "hadamard"}, {"block_size": 16}, {"scale_fmt": "e4m3"}],
}
