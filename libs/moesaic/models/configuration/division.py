"""The division of an attention instance's weights among its ranks. Needs no torch.

Weights are divided as in Megatron-LM (arXiv:1909.08053, section 3). Ranks divide attention by its
heads: projections of queries, keys and values by outputs, the output's projection by inputs. MLPs
are divided by their inner width, the head by its vocabulary. Every rank has all latents, norms and
gates.
"""

from dataclasses import dataclass, replace

from moesaic.errors import UnusableSettings
from moesaic.models.configuration.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    ModelConfig,
)

SETTING = "tensor_parallel"
_BY_HEADS = ("q_proj", "q_b_proj", "kv_b_proj", "sinks")
_BY_KV_HEADS = ("k_proj", "v_proj")
_BY_WIDTH = ("gate_proj", "up_proj")
_BY_WIDTH_TWICE = ("input_linear",)  # gate and up in one
_BY_INPUTS = ("o_proj.weight", "down_proj.weight", "output_linear.weight")
_ADDED_ONCE = ("o_proj.bias", "down_proj.bias")


@dataclass(frozen=True)
class Cut:
    """Part ``index`` of ``count`` equal ones, along one axis of a tensor or of its equal pieces there."""

    axis: int
    index: int
    count: int
    pieces: int = 1


@dataclass(frozen=True)
class Division:
    """The part of one rank.

    Attributes:
        rank: rank in ``0..ranks-1``; 0 leads.
        ranks: 1 or more.
        kv_parts: parts of the keys' and values' heads; ranks beyond share them.
    """

    rank: int
    ranks: int
    kv_parts: int

    def cut_of(self, name: str) -> Cut | None:
        """Return this rank's part of the tensor ``name`` (without its layer's prefix); None: all of it."""
        stem = name.rsplit(".", 1)[0]
        if name.endswith(_BY_INPUTS):
            return Cut(1, self.rank, self.ranks)
        if stem.endswith(_BY_KV_HEADS):
            return Cut(0, self.rank * self.kv_parts // self.ranks, self.kv_parts)
        if stem.endswith(_BY_HEADS + _BY_WIDTH):
            return Cut(0, self.rank, self.ranks)
        if stem.endswith(_BY_WIDTH_TWICE):
            return Cut(0, self.rank, self.ranks, pieces=2)
        return None

    def leaves_out(self, name: str) -> bool:
        """Return true if another rank adds the tensor ``name``, and this one must not."""
        return self.rank > 0 and name.endswith(_ADDED_ONCE)

    def vocabulary(self, size: int) -> range:
        """Return the tokens whose logits are computed here; the last ranks may have fewer."""
        each = self.tokens_each(size)
        return range(min(size, self.rank * each), min(size, (self.rank + 1) * each))

    def tokens_each(self, size: int) -> int:
        """Count the tokens of the first rank, of a vocabulary of ``size``."""
        return -(-size // self.ranks)


def divide(config: ModelConfig, rank: int, ranks: int) -> Division:
    """Divide a model among ``ranks``, of which ``rank`` is here.

    Raises:
        UnusableSettings: its heads or widths cannot be divided into this number of ranks.
    """
    attention = config.attention
    _require(attention.num_heads, ranks, "attention heads")
    if config.dense_size and len(config.moe_layers) < config.num_layers:
        _require(config.dense_size, ranks, "numbers inside a dense layer")
    if config.moe.shared_expert_size:
        _require(config.moe.shared_expert_size, ranks, "numbers inside the shared experts")
    kv_parts = ranks
    if isinstance(attention, GroupedQueryAttention):
        if attention.wide_qk_norm and ranks > 1:
            raise UnusableSettings(
                SETTING, f"{ranks} ranks cannot share a norm over all heads together; give 1"
            )
        kv_parts = min(ranks, attention.num_kv_heads)
        if attention.num_kv_heads % kv_parts or ranks % kv_parts:
            raise UnusableSettings(
                SETTING,
                f"{ranks} ranks cannot share the model's {attention.num_kv_heads} key and value heads; "
                "give a divisor or a multiple of them",
            )
    return Division(rank, ranks, kv_parts)


def part_of(config: ModelConfig, division: Division) -> ModelConfig:
    """Describe the part of a model that one rank has: fewer heads, narrower MLPs, less KV."""
    attention: GroupedQueryAttention | LatentAttention = config.attention
    heads = attention.num_heads // division.ranks
    if isinstance(attention, GroupedQueryAttention):
        kv_heads = attention.num_kv_heads // division.kv_parts
        attention = replace(attention, num_heads=heads, num_kv_heads=kv_heads)
    else:
        attention = replace(attention, num_heads=heads)
    moe = replace(config.moe, shared_expert_size=config.moe.shared_expert_size // division.ranks)
    return replace(
        config, attention=attention, moe=moe, dense_size=config.dense_size // division.ranks
    )


def _require(number: int, ranks: int, name: str) -> None:
    if number % ranks:
        raise UnusableSettings(
            SETTING,
            f"{ranks} ranks cannot share the model's {number} {name}; give a divisor of them",
        )
