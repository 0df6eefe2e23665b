"""Models as data: the sizes that time and memory depend on, all in bfloat16."""

from functools import cache
from importlib.resources import files

import msgspec

from moesaic.errors import InvalidInput

ITEM_BYTES = 2  # bfloat16
_DATA = files("moesaic_lab.simulation.elastic") / "data"


class AttentionShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of one layer.

    Attributes:
        num_heads: of queries.
        kv_width: numbers kept for one token.
        key_width: numbers that a head multiplies with a query for one key; of latent attention, as the latent is.
        value_width: numbers that a head sums up for one key.
        parameters: of all projections.
    """

    num_heads: int
    kv_width: int
    key_width: int
    value_width: int
    parameters: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model.

    Attributes:
        title: for people.
        source: of the sizes.
        num_layers: decoder layers.
        num_moe_layers: of them, those with routed experts.
        hidden: width of hidden states.
        vocabulary: tokens.
        num_experts: routed experts of a layer.
        top_k: experts of a token.
        expert_size: intermediate size of a routed expert.
        shared_size: of all shared experts of a layer together.
        dense_size: of the layers without routed experts.
        attention: of each layer.
    """

    title: str
    source: str = ""
    num_layers: int
    num_moe_layers: int
    hidden: int
    vocabulary: int
    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    dense_size: int
    attention: AttentionShape

    @property
    def expert_bytes(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden * self.expert_size * ITEM_BYTES

    @property
    def slot_bytes(self) -> int:
        """Weights of one routed expert of every layer."""
        return self.expert_bytes * self.num_moe_layers

    @property
    def attention_parameters(self) -> int:
        """Parameters that every row of a step passes on an attention worker, without head and embeddings."""
        gate = self.hidden * self.num_experts * self.num_moe_layers
        shared = 3 * self.hidden * self.shared_size * self.num_moe_layers
        dense = 3 * self.hidden * self.dense_size * (self.num_layers - self.num_moe_layers)
        return self.attention.parameters * self.num_layers + gate + shared + dense

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head."""
        return self.hidden * self.vocabulary

    @property
    def attention_bytes(self) -> int:
        """Weights of an attention worker: all that is not a routed expert, embeddings and head included."""
        return (self.attention_parameters + 2 * self.head_parameters) * ITEM_BYTES

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token."""
        return self.attention.kv_width * self.num_layers * ITEM_BYTES

    @property
    def key_flops(self) -> int:
        """Operations of one key that one query sees, in all layers."""
        widths = self.attention.key_width + self.attention.value_width
        return 2 * self.attention.num_heads * widths * self.num_layers


@cache
def model_shapes() -> dict[str, ModelShape]:
    """Read all models that come with the library."""
    content = (_DATA / "models.json").read_bytes()
    return msgspec.json.decode(content, type=dict[str, ModelShape])


def model_shape(name: str) -> ModelShape:
    """Find a model.

    Raises:
        InvalidInput: there is none of that name.
    """
    found = model_shapes().get(name)
    if found is None:
        raise InvalidInput(
            "model",
            f"must be one of {', '.join(model_shapes())}, or a model directory, got {name!r}",
        )
    return found
