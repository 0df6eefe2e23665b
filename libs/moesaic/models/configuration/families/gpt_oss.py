"""gpt-oss (arXiv:2508.10925)."""

from moesaic.models.configuration.architecture import ClampedSwiglu
from moesaic.models.configuration.family import COMMON, Family, FamilyParts, SparseNames
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, full_layers, grouped_query, mixture


def _read(fields: Fields) -> FamilyParts:
    if not any(map(fields.has, ("rope_parameters", "rope_scaling"))):
        raise fields.error("rope_parameters", "is null: leave it out for the family's, or give it")
    layers, bias = all_layers(fields), fields.flag("attention_bias")
    full = full_layers(fields, [layer % 2 == 0 for layer in layers])
    attention = grouped_query(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        sliding_window=None if full == layers else fields.size("sliding_window"),
        full_layers=full,
        sinks=True,
    )
    moe = mixture(
        fields,
        "num_local_experts",
        "intermediate_size",
        # Softmax over the chosen logits alone equals normalised shares of a softmax over all.
        norm_topk_prob=True,
        gate_bias=True,
        expert_bias=True,
        activation=ClampedSwiglu(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
    )
    return FamilyParts(attention, moe, layers)


_EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

FAMILY = Family(
    model_types=("gpt_oss",),
    read=_read,
    layouts=(
        SparseNames(
            "mlp.router.weight",
            _EXPERTS,
            gate_bias="mlp.router.bias",
            biases=tuple(f"{name}_bias" for name in _EXPERTS),
            by_turns=True,
        ),
    ),
    spellings={"num_local_experts": "num_experts"},
    defaults=COMMON
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "layer_types": None,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
