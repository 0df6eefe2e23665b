"""The schema of a family of models, which is data: one file each in ``families``. Needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.models.configuration.architecture import GroupedQueryAttention, LatentAttention, MoE
from moesaic.models.configuration.fields import Fields

# Defaults that the classes of all families share.
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "per_layer_config": None,
}
# Buffers of the rotary embedding, which old files carry and no forward pass uses.
ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|(cos|sin)_cached)"
MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SparseNames:
    """One way to name the tensors of a sparse layer, after the layer's prefix.

    Attributes:
        gate: ``[E, H]``.
        experts: gate, up and down of an expert, whose number takes the place of ``{}``; or of all experts together,
            ``[E, 2I, H]``, gate before up, and ``[E, H, I]``.
        correction: ``[E]``, after ``correction_axes``, if the model has it.
        correction_axes: axes of length 1 in front.
        shared: gate, up and down of the shared experts, or gate and up in one, and down; if the model has any.
        shared_gate: ``[1, H]``, if the model has it.
        gate_bias: ``[E]``, if the model has it.
        biases: biases of all experts together, ``[E, 2I]`` and ``[E, H]``, if the model has them.
        by_turns: all experts together are ``[E, H, 2I]``, where gates and ups take turns, as they do in their biases,
            and ``[E, I, H]``.
    """

    gate: str
    experts: tuple[str, ...]
    correction: str = ""
    shared: tuple[str, ...] = ()
    shared_gate: str = ""
    correction_axes: tuple[int, ...] = ()
    gate_bias: str = ""
    biases: tuple[str, ...] = ()
    by_turns: bool = False


def mlp_names(prefix: str, matrices: tuple[str, ...] = MATRICES) -> tuple[str, ...]:
    """Name the matrices of an MLP under ``prefix``."""
    return tuple(f"{prefix}{matrix}.weight" for matrix in matrices)


def usual_names(
    *, correction: str = "mlp.gate.e_score_correction_bias", shared: str = "mlp.shared_experts."
) -> tuple[SparseNames, SparseNames]:
    """Name the tensors as most families do, with the experts one by one, and together."""
    each, together = mlp_names("mlp.experts.{}."), together_under("mlp.")
    return tuple(  # type: ignore[return-value]  # two of them
        SparseNames(
            "mlp.gate.weight", names, correction, mlp_names(shared), "mlp.shared_expert_gate.weight"
        )
        for names in (each, together)
    )


def mixtral_names(*, correction: str = "") -> tuple[SparseNames, SparseNames]:
    """Name the tensors as Mixtral does, with the experts one by one, and as transformers keeps them."""
    each = mlp_names("block_sparse_moe.experts.{}.", ("w1", "w3", "w2"))
    published, kept = "block_sparse_moe.", "mlp."
    return (
        SparseNames(f"{published}gate.weight", each, published + correction),
        SparseNames(f"{kept}gate.weight", together_under(kept), kept + correction),
    )


def together_under(prefix: str) -> tuple[str, str]:
    """Name the tensors of all experts, as transformers keeps them."""
    return f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"


@dataclass(frozen=True)
class FamilyParts:
    """The parts in which models differ, read from one ``config.json``.

    Attributes:
        attention: attention of every layer.
        moe: experts and gates of the sparse layers.
        moe_layers: indices of these.
        dense_size: inner width of the MLP in the other layers.
        interleaved: rotated pairs are neighbours, not halves.
        embedding_multiplier: factor on the embedding's output.
        residual_multiplier: factor on what attention and MLPs add to the residual stream.
        logits_scaling: logits are divided by it.
    """

    attention: GroupedQueryAttention | LatentAttention
    moe: MoE
    moe_layers: tuple[int, ...]
    dense_size: int = 0
    interleaved: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_types: the values of ``model_type`` that name it.
        defaults: for fields that a ``config.json`` leaves out, as the family's class in transformers (5.23) has them. A
            field that is not here is needed in every file, or is optional. ``None`` is a value of its own: a class that
            takes it means something else by it than by leaving the field out.
        read: reads the parts, with the defaults filled in.
        layouts: names of the tensors of sparse layers; the published ones first.
        spellings: by the name of a field, another name that the class accepts for it.
        unused: patterns of tensors that its files carry and no forward pass uses.
    """

    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    read: Callable[[Fields], FamilyParts]
    layouts: tuple[SparseNames, ...]
    spellings: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = (ROTARY_BUFFERS,)
