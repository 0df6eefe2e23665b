"""What tensors are called inside a checkpoint."""

from moesaic.models.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """What the names of all tensors of decoder layer ``layer`` begin with."""
    return f"model.layers.{layer}."


def moe_prefix(checkpoint: Checkpoint, layer: int) -> str:
    """What the names of the gate and the experts of ``layer`` begin with; Mixtral's files have a name of their own."""
    mixtral = layer_prefix(layer) + "block_sparse_moe."
    return mixtral if mixtral + "gate.weight" in checkpoint else layer_prefix(layer) + "mlp."
