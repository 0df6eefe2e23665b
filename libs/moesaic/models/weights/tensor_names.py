"""The names of tensors in a checkpoint. Needs no torch."""

from collections.abc import Container

from moesaic.models.weights.formats.names import has_matrix

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# The matrices of an MLP, gate, up and down; Mixtral's experts have names of their own.
USUAL_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")


def layer_prefix(layer: int) -> str:
    """Return the prefix of all tensors of decoder layer ``layer``."""
    return f"model.layers.{layer}."


def moe_prefix(found: Container[str], layer: int) -> str:
    """Return the prefix of the gate and the experts of ``layer`` in files that have ``found``.

    Mixtral's have a name of their own.
    """
    mixtral = layer_prefix(layer) + "block_sparse_moe."
    return mixtral if mixtral + "gate.weight" in found else layer_prefix(layer) + "mlp."


def expert_names(found: Container[str], prefix: str) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down in files that have ``found``, under ``prefix``."""
    return MIXTRAL_NAMES if has_matrix(found, f"{prefix}{MIXTRAL_NAMES[0]}") else USUAL_NAMES
