"""The architecture of a model, in the same words for all families. Needs no torch."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal

Family = Literal["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2"]
Dtype = Literal["float32", "bfloat16", "float16"]
TopkMethod = Literal["greedy", "group_limited_greedy"]


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Heads that share keys and values in groups of ``num_heads / num_kv_heads``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool  # RMS norm over each head of queries and keys, before the rotation
    qkv_bias: bool
    output_bias: bool
    sliding_window: int | None  # a token sees itself and the ``sliding_window - 1`` before it

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer: keys, then values."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    num_heads: int
    q_lora_rank: int | None  # None: queries come from one full projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool  # on the two down-projections and the output

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.qk_rope_head_dim


@dataclass(frozen=True)
class Yarn:
    """Context extension by YaRN (arXiv:2309.00071): slowed frequencies and scaled attention."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the bounds of the ramp to whole dimensions
    rotation_scale: float  # multiplies cosine and sine
    softmax_scale: float  # multiplies the scores of latent attention; 1 elsewhere


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    yarn: Yarn | None


@dataclass(frozen=True)
class MoE:
    """The mixture-of-experts layers; all of a model's are alike."""

    num_experts: int
    top_k: int
    expert_size: int
    # Softmax runs over all experts, then the top k are taken. Normalising those equals Mixtral's
    # softmax over the chosen.
    norm_topk_prob: bool
    routed_scaling_factor: float
    topk_method: TopkMethod
    n_group: int  # experts fall into this many groups in order; 1 unless group-limited
    topk_group: int  # a token's experts come from this many groups
    float32_gate: bool  # gate logits are computed in float32, whatever the model's dtype
    shared_expert_size: int  # of all shared experts together, which count as one; 0: there is none
    shared_expert_gated: bool


@dataclass(frozen=True)
class ModelConfig:
    """One model: its sizes, its sparse layers, and the identity of the checkpoint."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention: GroupedQueryAttention | LatentAttention
    rope: Rope
    moe: MoE
    moe_layers: tuple[int, ...]
    dense_size: int  # of the MLP in the layers that are not in ``moe_layers``
    eos_token_ids: tuple[int, ...]
    dtype: Dtype  # what the checkpoint was made in
    config_digest: str  # hex sha256 of config.json and generation_config.json
    weights_digest: str = ""  # of every byte of the weights; empty where nobody has read them

    @cached_property
    def digest(self) -> str:
        """Hex sha256 that tells this configuration with these weights from any other."""
        return sha256(f"{self.config_digest} {self.weights_digest}".encode()).hexdigest()

    @property
    def kv_width(self) -> int:
        """Numbers (not bytes) that the KV cache keeps per token and layer."""
        return self.attention.kv_width

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.moe.expert_size * self.hidden_size
