"""Whatever ``config.json`` and ``generation_config.json`` hold, they are read, or an error names the field."""

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.errors import CheckpointError, UnusableSettings
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.context import with_context
from moesaic.models.configuration.families import FAMILIES
from moesaic.models.configuration.sizes import Numbers, kv_bytes, weight_bytes
from moesaic.models.layers.rope import RotaryEmbedding
from tests.models.configuration.test_weight_format import PUBLISHED
from tests.redis_keys import changed, paths

ROPES: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"type": "linear", "factor": 2},
]
# In place of any value; the first ones have met the most faults.
HUGE: list[Any] = [10**400, 1 << 64, 1e200, 1e-200, [[]]]
HOSTILE: list[Any] = [
    *(math.nan, math.inf, -math.inf, 1e-320, 1e308, 1e-200, 1e200, 0.5, -0.0),
    *(0, -1, 1, 2, 3, 64, 1 << 31, 1 << 64, 10**400, -(10**400)),
    *(
        None,
        True,
        False,
        "",
        "x" * 1000,
        "\0",
        [],
        {},
        [[]],
        {"": []},
        [None, {}],
        [1 << 64],
        [0.5],
    ),
]
hostile = st.sampled_from(HUGE) | st.sampled_from(HOSTILE)
FIELDS = (
    *("rms_norm_eps", "rope_theta", "eos_token_id", "sliding_window", "head_dim", "layer_types"),
    *("q_lora_rank", "moe_layer_freq", "clip_qkv", "dtype", "mlp_only_layers", "rotary_dim"),
)


def whole(model_type: str) -> dict[str, Any]:
    """A file with all that the family's class has defaults for, and heads that can be rotated."""
    defaults = FAMILIES[model_type].defaults
    needed = {} if "moe_k" in defaults else {"num_experts_per_tok": 2}
    return {**needed, **defaults, "num_attention_heads": 32, "model_type": model_type}


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration that can be read but for a few values, and one of generation."""
    config: Any = whole(draw(st.sampled_from(sorted(FAMILIES))))
    if draw(st.booleans()):
        config.pop("rope_parameters", None)
        config["rope_scaling"] = draw(st.sampled_from(ROPES))
    if draw(st.booleans()):
        config["quantization_config"] = draw(st.sampled_from(sorted(PUBLISHED.items())))[1][0]
    for _ in range(draw(st.integers(0, 3))):
        found = [path for path in paths(config) if path]
        chosen = draw(st.sampled_from([*found, *((field,) for field in FIELDS)]))
        config.setdefault(chosen[0], None)
        config = changed(config, chosen, draw(hostile))
    ends = [{"eos_token_id": value} for value in HOSTILE]
    return config, draw(st.just({}) | st.just({}) | st.sampled_from(ends))


def use(config: ModelConfig) -> None:
    """Compute what a service computes of a configuration before it reads weights."""
    assert 0 < config.rms_norm_eps < math.inf
    assert config.kv_width > 0
    numbers = Numbers("float32", "none", on_cpu=True, codes=None)
    assert kv_bytes(config, numbers) > 0
    assert weight_bytes(config, numbers).attention > 0
    assert with_context(config, 1).max_positions == 1
    with suppress(UnusableSettings):
        with_context(config, config.max_positions + 1)
    dim = config.attention.rotary_dim
    if dim < 1 << 16:
        RotaryEmbedding(config.rope, dim, interleaved=False, device=torch.device("cpu"))


def problem_of(directory: Path) -> str:
    """Say why a configuration is refused; use one that is not."""
    try:
        config = load_config(directory)
    except CheckpointError as error:
        return str(error)
    use(config)
    return ""


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_files_can_be_read_before_anything_of_them_is_changed(
    tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole(model_type)))

    use(load_config(tmp_path))


@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files())
def test_any_configuration_is_used_or_the_field_is_named(
    tmp_path: Path, written: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for name, values in zip(("config.json", "generation_config.json"), written, strict=True):
        (tmp_path / name).write_text(json.dumps(values))

    problem = problem_of(tmp_path)

    assert re.fullmatch(r"|(generation_)?config\.json: [\w.]+: .{,2000}", problem), problem
