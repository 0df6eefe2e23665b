"""The architecture of a model, in the same words for all families. Needs no torch."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal, NamedTuple

from moesaic.models.configuration.weight_format import WeightFormat

Dtype = Literal["float32", "bfloat16", "float16"]
# Of which experts the best are taken: all, those of the groups with the best expert, or those of the
# groups with the best two.
TopkMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]
ScoringFunc = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Heads that share keys and values in groups of ``num_heads / num_kv_heads``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False  # RMS norm over each head of queries and keys, before the rotation
    qkv_bias: bool = False
    output_bias: bool = False
    sliding_window: int | None = (
        None  # a token sees itself and the ``sliding_window - 1`` before it
    )
    wide_qk_norm: bool = False  # that norm is over all heads of queries, and all of keys, together
    clip: float | None = None  # bound of queries, keys and values, before the rotation
    rotated_dim: int | None = None  # only so many numbers of a head, the first; None: all
    scale: float | None = None  # of scores; None: ``head_dim**-0.5``
    # Tokens of these layers see everything before them, whatever the window.
    full_layers: tuple[int, ...] = ()
    sinks: bool = (
        False  # of each head, a learned logit joins the sum of its softmax and weighs no value
    )

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer: keys, then values."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.head_dim if self.rotated_dim is None else self.rotated_dim

    @property
    def softmax_scale(self) -> float:
        """Multiplies the scores of a query with keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def window_of(self, layer: int) -> int | None:
        """Return the window of a decoder layer; None: its tokens see everything before them."""
        return None if layer in self.full_layers else self.sliding_window


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


@dataclass(frozen=True)
class Llama3:
    """Context extension of Llama 3.1 (arXiv:2407.21783): waves that are long beside the context slow down."""

    factor: float
    original_max_positions: int
    low_freq_factor: (
        float  # of the context: the wavelength from which frequencies are divided by ``factor``
    )
    high_freq_factor: float  # the wavelength up to which they are kept


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    yarn: Yarn | None
    llama3: Llama3 | None = None
    slowdown: float = 1.0  # all frequencies are divided by it
    interleaved: bool = False  # pairs are neighbours, not halves
    softmax_scale: float = 1.0  # multiplies the scores of latent attention; 1 elsewhere


class ClampedSwiglu(NamedTuple):
    """An activation between the products of an expert (gpt-oss, arXiv:2508.10925): ``gate * sigmoid(slope * gate) *
    (up + 1)``, with gates up to ``limit`` and ups within it on both sides."""

    slope: float
    limit: float


@dataclass(frozen=True)
class MoE:
    """The mixture-of-experts layers; all of a model's are alike."""

    num_experts: int
    top_k: int
    expert_size: int
    # Scores are of all experts, then the top k are taken. Normalising those of a softmax equals Mixtral's
    # softmax over the chosen.
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    topk_method: TopkMethod = "greedy"
    n_group: int = 1  # experts fall into this many groups in order; 1 unless group-limited
    topk_group: int = 1  # a token's experts come from this many groups
    float32_gate: bool = False  # gate logits are computed in float32, whatever the model's dtype
    shared_expert_size: int = (
        0  # of all shared experts together, which count as one; 0: there is none
    )
    shared_expert_gated: bool = False
    scoring_func: ScoringFunc = "softmax"
    correction_bias: bool = False  # each expert has a bias, by which it is chosen and not weighed
    norm_epsilon: float = 0.0  # added to the sum by which ``norm_topk_prob`` divides
    norm_least: float = 0.0  # least value of that sum
    gate_bias: bool = False  # added to the gate's logits
    expert_bias: bool = False  # on both products of every routed expert
    activation: ClampedSwiglu | None = None  # of routed experts; None: SwiGLU

    @property
    def group_limited(self) -> bool:
        """A token's experts come from some of the groups alone."""
        return self.topk_method != "greedy" and self.topk_group < self.n_group


@dataclass(frozen=True)
class ModelConfig:
    """One model: its sizes, its sparse layers, and the identity of the checkpoint."""

    family: str  # ``model_type`` of its file
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
    weight_format: WeightFormat | None = None  # of matrices that are stored quantised
    tokenizer_end_ids: tuple[
        int, ...
    ] = ()  # those of ``eos_token_ids`` that only the tokenizer names
    weights_digest: str = ""  # of every byte of the weights; empty where nobody has read them
    embedding_multiplier: float = 1.0  # of what the embedding gives
    logits_scaling: float = 1.0  # logits are divided by it

    @cached_property
    def digest(self) -> str:
        """Hex sha256 that tells this configuration with these weights from any other."""
        return sha256(f"{self.config_digest} {self.weights_digest}".encode()).hexdigest()

    @cached_property
    def answering_digest(self) -> str:
        """Hex sha256 of what a gateway and its attention workers agree on: the configuration and all end tokens."""
        if not self.tokenizer_end_ids:
            return self.config_digest
        return sha256(f"{self.config_digest} {self.tokenizer_end_ids}".encode()).hexdigest()

    @property
    def kv_width(self) -> int:
        """Numbers (not bytes) that the KV cache keeps per token and layer."""
        return self.attention.kv_width
