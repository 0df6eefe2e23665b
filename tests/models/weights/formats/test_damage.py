"""Published checkpoints that are malformed, or that nobody can read: errors name file, field or tensor."""

from typing import Any

import pytest
import torch

from benchmarks.parity.cases import CPU
from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from tests.models.weights.formats.conftest import Both, Make, some

Q = "model.layers.1.self_attn.q_proj"
GPTQ, AWQ, FP8, PACKED = "gptq v1, 4 bits, groups of 32, sym", "awq, groups of 32", "fp8", "pack"
ZEROS = "pack-quantized, 4 bits, groups of 32, with"


def load(both: Both) -> None:
    config = load_config(both.published)
    checkpoint = Checkpoint.of_model(both.published, config)
    Decoder.load(checkpoint, config, torch.float32, CPU)
    for layer in config.moe_layers:
        load_expert(checkpoint, config, layer, 0, torch.float32, CPU)


def weights(**changes: Any) -> dict[str, Any]:
    told = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"config_groups": {"group_0": {"weights": {**told, **changes}}}}


EIGHT_BITS = weights(num_bits=8)["config_groups"]["group_0"]
TWO_GROUPS = {"config_groups": {**weights()["config_groups"], "b": EIGHT_BITS}}


@pytest.mark.parametrize(
    ("form", "fields", "field"),
    [
        (GPTQ, {"quant_method": "bitsandbytes"}, "quant_method"),
        (GPTQ, {"quant_method": ...}, "quant_method"),
        (GPTQ, {"bits": 3}, "bits"),
        (GPTQ, {"bits": "4"}, "bits"),
        (GPTQ, {"group_size": 0}, "group_size"),
        (GPTQ, {"group_size": ...}, "group_size"),
        (GPTQ, {"desc_act": "yes"}, "desc_act"),
        (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ, {"lm_head": True}, "lm_head"),
        (GPTQ, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (AWQ, {"version": "gemv"}, "version"),
        (AWQ, {"zero_point": False}, "zero_point"),
        (AWQ, {"bits": 8}, "bits"),
        (FP8, {"weight_block_size": [128]}, "weight_block_size"),
        (FP8, {"weight_block_size": [128, 0]}, "weight_block_size"),
        (FP8, {"fmt": "e5m2"}, "fmt"),
        (PACKED, {"format": "marlin-24"}, "format"),
        (PACKED, {"config_groups": {}}, "config_groups"),
        (PACKED, {"config_groups": {"a": {}}}, r"config_groups\.a"),
        (PACKED, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED, weights(num_bits=3), r"config_groups\.group_0\.weights\.num_bits"),
        (PACKED, weights(type="float"), r"config_groups\.group_0\.weights\.type"),
        (PACKED, weights(strategy="tensor"), r"config_groups\.group_0\.weights\.strategy"),
        (PACKED, weights(actorder="else"), r"config_groups\.group_0\.weights\.actorder"),
        (PACKED, TWO_GROUPS, "config_groups: weights of several formats"),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(
    make: Make, form: str, fields: dict[str, Any], field: str
) -> None:
    both = make("qwen3_moe", form)
    both.configure(**fields)

    with pytest.raises(CheckpointError, match=rf"config\.json.*quantization_config\.{field}"):
        load_config(both.published)


def test_a_null_is_no_format(make: Make) -> None:
    both = make("qwen3_moe", GPTQ)
    config = (both.published / "config.json").read_text()
    start = config.index('"quantization_config"')
    (both.published / "config.json").write_text(config[:start] + '"quantization_config": null}')

    assert load_config(both.published).weight_format is None
    with pytest.raises(CheckpointError, match="are not part of the model"):
        load(both)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (GPTQ, "qzeros"),
        (GPTQ, "scales"),
        (AWQ, "qzeros"),
        (AWQ, "scales"),
        (FP8, "weight_scale_inv"),
        (PACKED, "weight_scale"),
        (PACKED, "weight_shape"),
        (ZEROS, "weight_zero_point"),
        ("float-quantized, by channel", "weight_scale"),
    ],
)
def test_a_part_that_is_missing_mis_shaped_or_of_another_dtype_is_named(
    make: Make, form: str, part: str
) -> None:
    both = make("qwen3_moe", form)
    whole = both.tensors[f"{Q}.{part}"]

    both.change(**{f"{Q}.{part}": None})
    with pytest.raises(CheckpointError, match=rf"missing.*{Q}\.{part}|{Q}\.{part}.*missing"):
        load(both)
    both.change(**{f"{Q}.{part}": torch.cat((whole, whole))})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{Q}\.{part}.*expected"):
        load(both)
    both.change(**{f"{Q}.{part}": whole.to(torch.int16)})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{Q}\.{part}.*found I16"):
        load(both)


@pytest.mark.parametrize(
    ("form", "fields", "part"),
    [
        (GPTQ, {"group_size": 64}, "scales"),
        (GPTQ, {"sym": False, "bits": 8}, "qweight"),
        (GPTQ, {"checkpoint_format": "gptq_v2"}, "qzeros"),
        (AWQ, {"group_size": 64}, "qzeros"),
        ("fp8, blocks of 32", {"weight_block_size": [32, 64]}, "weight_scale_inv"),
        (PACKED, weights(group_size=64), "weight_scale"),
        ("gptq v1, 4 bits, groups of 32, desc_act", {"desc_act": False}, "g_idx"),
    ],
)
def test_a_field_that_contradicts_the_tensors_is_found_out(
    make: Make, form: str, fields: dict[str, Any], part: str
) -> None:
    both = make("qwen3_moe", form)
    both.configure(**fields)

    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*self_attn\.._proj\.{part}"):
        load(both)


@pytest.mark.parametrize(
    ("form", "name", "value", "problem"),
    [
        (FP8, f"{Q}.weight", float("nan"), "NaN"),
        (FP8, f"{Q}.weight_scale_inv", float("inf"), "infinite"),
        (AWQ, f"{Q}.scales", float("nan"), "NaN"),
        (GPTQ, f"{Q}.g_idx", 2, "groups from 0 to 1"),
        (GPTQ, f"{Q}.qzeros", 0, "not symmetric"),
        (PACKED, f"{Q}.weight_shape", 65, r"expected \[64, 64\], found \[64, 65\]"),
        ("mxfp4", "model.layers.2.mlp.experts.down_proj_scales", 255, "NaN"),
    ],
)
def test_damage_is_found_and_named(
    make: Make, form: str, name: str, value: float, problem: str
) -> None:
    both = make("qwen3_moe", form)
    whole = both.tensors[name]
    changed = some(whole, value)
    if "mxfp4" in form:  # of the expert that is loaded
        changed = whole.clone()
        changed[0, -1, -1] = int(value)
    both.change(**{name: changed})

    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}.*{problem}"):
        load(both)


def test_biases_that_are_not_zero_are_refused(make: Make) -> None:
    both = make("qwen3_moe", GPTQ)
    both.change(**{f"{Q}.bias": some(torch.zeros(64).half(), 0.1)})

    with pytest.raises(CheckpointError, match=rf"not part of the model.*{Q}\.bias"):
        load(both)


def test_blocks_without_their_scales_are_refused(make: Make) -> None:
    both = make("qwen3_moe", "mxfp4")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    both.change(**{name: None})

    with pytest.raises(CheckpointError, match=f"missing.*{name}|{name}.*missing"):
        load(both)


def test_codes_in_a_model_without_a_format_are_refused(make: Make) -> None:
    both = make("qwen3_moe", FP8)
    config = (both.published / "config.json").read_text()
    start = config.index('"quantization_config"')
    (both.published / "config.json").write_text(config[: start - 2] + "}")
    scales = [n for n in both.tensors if "scale_inv" in n]
    both.change(**dict.fromkeys(scales))

    with pytest.raises(CheckpointError, match="expected one of F32, F16, BF16, found F8_E4M3"):
        load(both)
