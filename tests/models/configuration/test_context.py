"""--max-model-len: contexts are cut, and made longer only where the rotation is scaled for it."""

import json
from pathlib import Path

import pytest

from benchmarks.memory.checkpoint import SHAPE
from moesaic.errors import UnusableSettings
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.context import with_context
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.usage.reading import BadSettings, read_settings

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def config_of(directory: Path, **changes: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    return load_config(directory)


def test_a_context_is_cut_and_the_model_stays_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    cut = with_context(config, 1000)
    assert (cut.max_positions, cut.digest) == (1000, config.digest)
    assert with_context(config, 0) is config
    assert with_context(config, 4096).max_positions == 4096


def test_more_than_the_model_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableSettings, match=r"--max-model-len: 4097 .* 4096 positions"):
        with_context(config_of(tmp_path), 4097)


def test_a_scaled_rotation_reaches_further_than_the_positions_say(tmp_path: Path) -> None:
    scaled = config_of(tmp_path, rope_scaling=YARN)
    assert with_context(scaled, 8192).max_positions == 8192
    with pytest.raises(UnusableSettings, match="8192 positions"):
        with_context(scaled, 8193)


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8K", 8192), ("8k", 8000), ("1M", 1 << 20), ("0", 0)]
)
def test_lengths_are_read_as_vllm_reads_them(text: str, tokens: int) -> None:
    flags = ["--model", "m", "--max-model-len", text]
    assert read_settings(AttentionSettings, flags).max_model_len == tokens
    assert read_settings(GatewaySettings, flags).max_model_len == tokens


@pytest.mark.parametrize("text", ["K", "8.5K", "8 K", "-1", "8T"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(BadSettings, match="--max-model-len"):
        read_settings(AttentionSettings, ["--model", "m", f"--max-model-len={text}"])
