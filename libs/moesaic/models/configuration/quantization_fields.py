"""The fields of ``quantization_config`` that do not change the meaning of the weights, by method.

They are about the quantisation process, the activations, the kernel, or the modules that are not quantised. The last
follow from the dtypes of the tensors. Any field that is neither here nor read is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

MODULES_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")
_EVERYWHERE = {*MODULES_LEFT_OUT, "dequantize", "provider"}
_GPTQ = _EVERYWHERE | {
    # AutoGPTQ and optimum.
    *("true_sequential", "static_groups", "damp_percent", "model_name_or_path", "tokenizer"),
    *("model_file_base_name", "dataset", "model_seqlen", "block_name_to_quantize", "batch_size"),
    *("module_name_preceding_first_block", "pad_token_id", "max_input_length", "nsamples"),
    *("modules_in_block_to_quantize", "cache_block_outputs", "use_cuda_fp16"),
    *("use_exllama", "disable_exllama", "exllama_config", "backend"),
    # GPTQModel.
    *("meta", "damp_auto_increment", "act_group_aware", "hyb_act", "mse", "gptaq", "v2", "hessian"),
    *("pack_impl", "parallel_packing", "device", "fallback", "failsafe", "moe", "vram_strategy"),
    *("offload_to_disk", "offload_to_disk_path", "gc_mode", "auto_forward_data_parallel"),
    *("wait_for_submodule_finalizers", "compute_device_filter", "mock_quantization"),
    # AutoRound, which writes files of this format.
    *("autoround_version", "iters", "lr", "minmax_lr", "seqlen", "amp", "scale_dtype", "train_bs"),
    *("low_gpu_mem_usage", "gradient_accumulate_steps", "enable_minmax_tuning", "quant_block_list"),
    *("enable_quanted_input", "enable_norm_bias_tuning", "enable_alg_ext", "not_use_best_mse"),
    *("to_quant_block_names", "dynamic_max_gap", "sampler", "act_bits", "act_group_size"),
    *("act_sym", "act_dynamic", "act_data_type"),
    *("static_kv_granularity", "static_attention_granularity"),
}
WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "gptq": frozenset(_GPTQ),
    "awq": frozenset(
        # The classes of transformers write the fields of GPTQ too. The files have the zero points.
        (_GPTQ - {"backend"})
        | {"sym", "desc_act", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"}
    ),
    "fp8": frozenset(_EVERYWHERE | {"activation_scheme"}),
    "mxfp4": frozenset(_EVERYWHERE),
    "compressed-tensors": frozenset(
        _EVERYWHERE
        | {"quantization_status", "global_compression_ratio", "version", "run_compressed"}
        | {"use_optimized_inference"}
    ),
}
OF_SCHEME = frozenset({"targets", "input_activations", "output_activations"})
"""The same for one of the ``config_groups`` of compressed-tensors."""
OF_WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
"""The same for its ``weights``."""
_BLOCK = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")


def as_saved_now(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Write the ``weights`` of a scheme as compressed-tensors saves them; it also reads other spellings.

    Words may be in capitals, a block may be a string, an order may be a boolean, and the strategy may be missing: it
    follows from the size of groups.
    """
    told = dict(weights)
    for name in ("type", "strategy", "actorder"):
        if isinstance(told.get(name), str):
            told[name] = told[name].lower()
    if isinstance(told.get("actorder"), bool):
        told["actorder"] = "group" if told["actorder"] else None
    block = told.get("block_structure")
    if isinstance(block, str) and (sizes := _BLOCK.fullmatch(block)):
        told["block_structure"] = [int(size) for size in sizes.groups()]
    if told.get("strategy") is None:
        size = told.get("group_size")
        told["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    return told
