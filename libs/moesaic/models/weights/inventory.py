"""The inventory of a model: its files hold no tensor that is neither read nor known to be useless. Needs no torch."""

import re
from collections.abc import Container, Iterator, Mapping
from itertools import pairwise

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.models.configuration.families import FAMILIES
from moesaic.models.configuration.family import MATRICES, mlp_names
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.files import all_zeros, same_payload
from moesaic.models.weights.formats.names import is_unread, shared_scales, stored_names
from moesaic.models.weights.header import StoredTensor
from moesaic.models.weights.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_prefix,
    sparse_names,
)

MAX_NAMED = 3  # tensors in one complaint

# A layer that predicts one token more; it follows the decoder's layers and has this tensor.
_MTP_LAYER = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Make sure that the files of a model hold nothing but what the model has.

    Args:
        config: configuration of the model.
        tensors: all that its files hold.

    Raises:
        CheckpointError: some of them would never be read, so they belong to another model than
            that of ``config``; names the first few.
    """
    left = tensors.keys() - set(_unused(config, tensors))
    # May be far more than there are.
    left.difference_update(tensor_names(config, tensors))
    unread = sorted(left)
    if unread == [HEAD] and EMBEDDING in tensors:
        if same_payload(tensors[HEAD], tensors[EMBEDDING]):
            return
        raise CheckpointError(
            tensors[HEAD].file.name,
            f"config.json ties it to {EMBEDDING} by tie_word_embeddings, but they differ: correct "
            "the one or leave out the other",
            tensor=HEAD,
        )
    if unread:
        more = f" and {len(unread) - MAX_NAMED} more" if len(unread) > MAX_NAMED else ""
        raise CheckpointError(
            tensors[unread[0]].file.name,
            f"{len(unread)} tensors are not part of the model that config.json describes: "
            f"{', '.join(unread[:MAX_NAMED])}{more}",
        )


def tensor_names(
    config: ModelConfig, found: Container[str], *, experts: bool = True
) -> Iterator[str]:
    """List every tensor of the model, without routed ``experts`` if it says so, as in files that have ``found``."""
    for name in _plain_names(config, found, experts):
        yield from stored_names(config.weight_format, name, found)
    for layer in config.moe_layers if experts else ():
        names = [layer_prefix(layer) + name for name in sparse_names(config, found, layer).experts]
        yield from shared_scales(config.weight_format, names, found)


def _plain_names(config: ModelConfig, found: Container[str], experts: bool) -> Iterator[str]:
    yield EMBEDDING
    yield FINAL_NORM
    if not config.tie_word_embeddings:
        yield HEAD
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        yield f"{prefix}input_layernorm.weight"
        yield f"{prefix}post_attention_layernorm.weight"
        for name in _attention_names(config):
            yield f"{prefix}self_attn.{name}"
        if layer in config.moe_layers:
            yield from _sparse_names(config, found, layer, experts)
        else:
            yield from mlp_names(f"{prefix}mlp.")


def _attention_names(config: ModelConfig) -> Iterator[str]:
    attention = config.attention
    yield "o_proj.weight"
    if isinstance(attention, LatentAttention):
        compressed = attention.q_lora_rank is not None
        query = "q_a_proj" if compressed else "q_proj"
        yield from (f"{query}.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight")
        yield "kv_a_layernorm.weight"
        if compressed:
            yield from ("q_a_layernorm.weight", "q_b_proj.weight")
        if attention.bias:
            yield from ("o_proj.bias", "kv_a_proj_with_mqa.bias")
            if compressed:
                yield f"{query}.bias"
        return
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"{name}.weight"
        if attention.qkv_bias:
            yield f"{name}.bias"
    if attention.sinks:
        yield "sinks"
    if attention.output_bias:
        yield "o_proj.bias"
    if attention.qk_norm:
        yield from ("q_norm.weight", "k_norm.weight")


def _sparse_names(
    config: ModelConfig, found: Container[str], layer: int, experts: bool
) -> Iterator[str]:
    names, moe = sparse_names(config, found, layer), config.moe
    of_layer = [names.gate]
    if moe.gate_bias:
        of_layer.append(names.gate_bias)
    if moe.correction_bias:
        of_layer.append(names.correction)
    if moe.shared_expert_size:
        of_layer.extend(names.shared)
    if moe.shared_expert_gated:
        of_layer.append(names.shared_gate)
    if experts:
        each = len(names.experts) == len(MATRICES)
        for expert in range(moe.num_experts if each else 1):
            of_layer.extend(name.format(expert) for name in names.experts)
        if moe.expert_bias:
            of_layer.extend(names.biases)
    yield from (layer_prefix(layer) + name for name in of_layer)


def _unused(config: ModelConfig, names: Mapping[str, StoredTensor]) -> Iterator[str]:
    patterns = [re.compile(pattern) for pattern in FAMILIES[config.family].unused]
    yield from (name for name in names if any(p.fullmatch(name) for p in patterns))
    # transformers writes matrices of size 0 for shared experts that a model does not have; quantised ones have
    # scales beside them.
    empty = {name.rpartition(".")[0] for name, stored in names.items() if 0 in stored.shape}
    yield from (name for name in names if name.rpartition(".")[0] in empty)
    if config.weight_format is not None:
        yield from (name for name in names if is_unread(name))
        yield from _empty_biases(config.weight_format, names)
    extra = sorted(int(match[1]) for name in names if (match := _MTP_LAYER.fullmatch(name)))
    # They follow the decoder's layers without a gap: others are of a longer model than config.json says.
    if extra and extra[0] == config.num_layers and all(b == a + 1 for a, b in pairwise(extra)):
        prefixes = tuple(layer_prefix(layer) for layer in extra)
        yield from (name for name in names if name.startswith(prefixes))


def _empty_biases(weight_format: WeightFormat, names: Mapping[str, StoredTensor]) -> Iterator[str]:
    """List the biases of zeros that older versions of AutoGPTQ write beside every matrix."""
    if weight_format.layout != "gptq":
        return
    for name, stored in names.items():
        beside = f"{name.removesuffix('bias')}qweight" in names
        if name.endswith(".bias") and beside and all_zeros(stored):
            yield name
