"""The names of tensors in a checkpoint. Needs no torch."""

from collections.abc import Container

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.families import FAMILIES
from moesaic.models.configuration.family import SparseNames
from moesaic.models.weights.formats.names import holds

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """Return the prefix of all tensors of decoder layer ``layer``."""
    return f"model.layers.{layer}."


def sparse_names(config: ModelConfig, found: Container[str], layer: int) -> SparseNames:
    """Return the names of a sparse layer's tensors after ``layer_prefix``, in files that have ``found``."""
    layouts, prefix = FAMILIES[config.family].layouts, layer_prefix(layer)
    known = (each for each in layouts if holds(found, prefix + each.experts[0].format(0)))
    return next(known, layouts[0])
