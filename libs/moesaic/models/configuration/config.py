"""Read the configuration of a model directory. Needs no torch."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import Dtype, LatentAttention, ModelConfig
from moesaic.models.configuration.end_tokens import read_end_tokens
from moesaic.models.configuration.families import FAMILIES
from moesaic.models.configuration.fields import Fields, read_json
from moesaic.models.configuration.rope_fields import read_rope
from moesaic.models.configuration.tokenizer_files import CONFIG as TOKENIZER
from moesaic.models.configuration.weight_format import WeightFormat, read_weight_format

__all__ = ["ModelConfig", "load_config"]


def load_config(directory: Path) -> ModelConfig:
    """Read the model directory's ``config.json``, ``generation_config.json`` and end tokens, but no weights.

    Raises:
        CheckpointError: not a directory, no ``config.json``, or a field that is missing, invalid,
            not supported, or contradicts another one.
    """
    # No error for a name that is too long.
    if not os.path.isdir(directory):
        raise CheckpointError(
            str(directory), "is not a directory; give a model directory in Hugging Face format"
        )
    generation = directory / "generation_config.json"
    files = [path for path in (directory / "config.json", generation) if path.exists()]
    fields = Fields("config.json", read_json(directory / "config.json"))
    ends = Fields(generation.name, read_json(generation) if generation in files else {})
    return read_config(fields, ends, directory, _digest_of(files))


def read_config(
    fields: Fields,
    generation: Fields,
    directory: Path | None = None,
    config_digest: str = "",
) -> ModelConfig:
    """Read the fields of both files, and the tokenizer of the directory, if one is given.

    Raises:
        CheckpointError: the same as of ``load_config``.
    """
    model_type = fields.choice("model_type", tuple(FAMILIES))
    family = FAMILIES[model_type]
    fields = fields.filled(family.defaults, {"dtype": "torch_dtype", **family.spellings})
    fields.choice("hidden_act", ("silu", "swish"))
    _refuse_unsupported(fields)
    parts = family.read(fields)
    attention = parts.attention
    if attention.rotary_dim % 2:
        raise fields.error(
            "head_dim", f"rotary embedding needs an even width, got {attention.rotary_dim}"
        )
    weight_format = read_weight_format(fields)
    rope = read_rope(fields, latent=isinstance(attention, LatentAttention))
    vocab_size = fields.size("vocab_size")
    ends = read_end_tokens(fields, generation, directory, vocab_size)
    # What is added to the residual stream counts as often if the stream is divided instead, from the
    # embedding on; its norms then need a smaller epsilon.
    added = parts.residual_multiplier
    return ModelConfig(
        family=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps") / added**2,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention=attention,
        rope=replace(rope, interleaved=parts.interleaved),
        moe=parts.moe,
        moe_layers=parts.moe_layers,
        dense_size=parts.dense_size,
        eos_token_ids=tuple(ends),
        tokenizer_end_ids=tuple(end for end, file in ends.items() if file == TOKENIZER),
        dtype=_read_dtype(fields, weight_format),
        config_digest=config_digest,
        weight_format=weight_format,
        embedding_multiplier=parts.embedding_multiplier / added,
        logits_scaling=parts.logits_scaling,
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("per_layer_config"):
        raise fields.error("per_layer_config", "layers of several shapes are not supported")


def _read_dtype(fields: Fields, weight_format: WeightFormat | None) -> Dtype:
    # As gpt-oss: what is not codes there is bfloat16.
    if not fields.has("dtype"):
        return "bfloat16" if weight_format else "float32"
    return cast("Dtype", fields.choice("dtype", get_args(Dtype)))


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
