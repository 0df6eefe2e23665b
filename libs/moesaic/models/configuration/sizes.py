# The memory of a model, by arithmetic on its configuration. Imports no torch.
#   Weights    as moesaic.kernels.held_bytes says for their form; biases and norms are not counted.
#   Tied       an embedding that is the head, too, is held once.
#   Step       hidden states of every stage, queries, keys and values, and results of chosen experts, by row;
#              logits of the sequences that get a token, and a copy.
"""Bytes of weights, of KV and of steps of a model, from its configuration."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moesaic.kernels.held_bytes import Dtype, Quantization, WeightForm, held_bytes
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.native.compile import VARIANTS, this_variant

if TYPE_CHECKING:  # it takes pydantic, which commands do without
    from moesaic.settings import ModelSettings

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LEAST_KV_TOKENS = 1024
_USUAL_KV_TOKENS = 16_384  # of a model of short contexts
_USUAL_CONTEXTS = 8  # whole ones; more KV is for those who ask
MOVING = 16  # of so many experts of a worker, one is held twice while a placement changes
ON_GPU_BYTES = 500 << 20  # of a device, for each process: its context and the libraries' kernels
USUAL_ROWS, USUAL_SEQUENCES = 2048, 64  # of a step, by default


@dataclass(frozen=True)
class Numbers:
    """The form in which a process computes.

    Attributes:
        dtype: dtype of weights that are not quantised; on a GPU of activations and KV, too.
        quantization: quantisation of weights.
        on_cpu: weights are packed, activations and KV are float32.
        codes: the form of weights that are published quantised and held so; None: there are none.
        panel: outputs of a packed matrix that lie side by side; those of this processor's kernels.
    """

    dtype: Dtype = "float32"
    quantization: Quantization = "none"
    on_cpu: bool = True
    codes: WeightForm | None = None
    panel: int = field(default_factory=lambda: VARIANTS[this_variant()].panel)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of activations and KV."""
        return 4 if self.on_cpu else ITEM_BYTES[self.dtype]

    def matrix(self, num_out: int, num_in: int, *, quantised: bool = True) -> int:
        """Count the bytes of a matrix ``[out, in]``."""
        form = WeightForm.of(self.dtype, self.quantization if quantised else "none")
        if quantised and self.codes:
            form = self.codes
        return held_bytes((num_out, num_in), form, self.panel if self.on_cpu else 1)

    def table(self, num_out: int, num_in: int) -> int:
        """Count the bytes of the embedding, or of the head."""
        form = WeightForm.of(self.dtype, "none" if self.quantization == "none" else "int8")
        return held_bytes((num_out, num_in), form, self.panel if self.on_cpu else 1)


def numbers_for(settings: "ModelSettings", config: ModelConfig) -> Numbers:
    """Say in which form a service with ``settings`` computes a model; a GPU holds no weights as float16."""
    on_cpu = settings.device == "cpu"
    dtype: Dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    if dtype == "float16" and not on_cpu:
        dtype = "float32"
    codes = config.weight_format.held if config.weight_format else None
    return Numbers(dtype, settings.quantization, on_cpu, codes)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights by part, each of all layers together, but of routed experts."""

    embedding: int
    head: int  # 0: it is the embedding
    attention: int
    dense: int  # MLPs of layers without experts
    shared: int  # experts that every token passes, with their gates
    gates: int
    expert: int  # one routed expert


def weight_bytes(config: ModelConfig, numbers: Numbers) -> WeightBytes:
    """Count the bytes of a model's weights as a process holds them."""
    hidden, moe, sparse = config.hidden_size, config.moe, len(config.moe_layers)
    shared = _mlp(config, moe.shared_expert_size, numbers)
    if moe.shared_expert_gated:
        shared += numbers.matrix(1, hidden, quantised=False)
    plain = config.weight_format is not None and not config.weight_format.attention
    of_attention = replace(numbers, codes=None) if plain else numbers
    of_gate = replace(numbers, dtype="float32") if moe.float32_gate else numbers
    table = numbers.table(config.vocab_size, hidden)
    return WeightBytes(
        embedding=table,
        head=0 if config.tie_word_embeddings else table,
        attention=config.num_layers * _attention(config, of_attention),
        dense=(config.num_layers - sparse) * _mlp(config, config.dense_size, numbers),
        shared=sparse * shared,
        gates=sparse * of_gate.matrix(moe.num_experts, hidden, quantised=False),
        expert=_mlp(config, moe.expert_size, numbers),
    )


def kv_bytes(config: ModelConfig, numbers: Numbers) -> int:
    """Count the bytes of one token's KV in all layers."""
    return config.num_layers * config.kv_width * numbers.item_bytes


def usual_kv_tokens(max_positions: int) -> int:
    """Count the tokens for which a worker has KV where memory allows, by the longest context."""
    return max(_USUAL_KV_TOKENS, _USUAL_CONTEXTS * max_positions)


def batch_bytes(config: ModelConfig, numbers: Numbers, rows: int = USUAL_ROWS) -> int:
    """Estimate the bytes that an expert worker needs to answer for one layer of ``rows`` rows."""
    return rows * 4 * config.hidden_size * numbers.item_bytes


def least_attention_bytes(config: ModelConfig, numbers: Numbers) -> int:
    """Count the bytes without which no attention worker can work whose experts are elsewhere."""
    weights = weight_bytes(config, numbers)
    held = weights.embedding + weights.head + weights.attention + weights.dense + weights.shared
    step = step_bytes(config, numbers, USUAL_ROWS, USUAL_SEQUENCES)
    return held + weights.gates + step + LEAST_KV_TOKENS * kv_bytes(config, numbers)


def step_bytes(config: ModelConfig, numbers: Numbers, rows: int, sequences: int) -> int:
    """Estimate the bytes of the activations of a step, beside the KV that it writes.

    Args:
        config: configuration of the model.
        numbers: number formats of the process.
        rows: rows of the step.
        sequences: rows with logits.
    """
    return rows * row_numbers(config) * numbers.item_bytes + 2 * sequences * config.vocab_size * 4


def row_numbers(config: ModelConfig) -> int:
    """Count the numbers that one row of a step needs, but for its logits."""
    return (12 + config.moe.top_k) * config.hidden_size + 2 * config.kv_width


def _mlp(config: ModelConfig, size: int, numbers: Numbers) -> int:
    if not size:
        return 0
    return numbers.matrix(2 * size, config.hidden_size) + numbers.matrix(config.hidden_size, size)


def _attention(config: ModelConfig, numbers: Numbers) -> int:
    how, hidden = config.attention, config.hidden_size
    if not isinstance(how, LatentAttention):
        width = how.num_heads * how.head_dim
        return numbers.matrix(width + how.kv_width, hidden) + numbers.matrix(hidden, width)
    qk_dim, rank = how.qk_nope_head_dim + how.qk_rope_head_dim, how.q_lora_rank
    queries = how.num_heads * qk_dim
    down = numbers.matrix((queries if rank is None else rank) + how.kv_width, hidden)
    up = 0 if rank is None else numbers.matrix(queries, rank)
    by_head = numbers.matrix(how.kv_lora_rank, how.qk_nope_head_dim, quantised=False)
    by_head += numbers.matrix(how.v_head_dim, how.kv_lora_rank, quantised=False)
    output = numbers.matrix(hidden, how.num_heads * how.v_head_dim)
    return down + up + how.num_heads * by_head + output
