"""The gate: the learned layer that picks each token's top-k experts."""

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import RoutedExpertsKernel
from moesaic.kernels.linear import PackedLinear, activation_dtype, make_linear
from moesaic.kernels.packed_experts import PackedSlots
from moesaic.kernels.promised import LayerRung
from moesaic.models.configuration.architecture import ModelConfig, MoE
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.tensor_names import moe_prefix
from moesaic.native.library import lib, scratch, usable


class Gate:
    """The gate of one layer."""

    def __init__(self, weight: Tensor, moe: MoE) -> None:
        """Take ``weight`` ``[E, H]``."""
        self._dtype = activation_dtype(weight.dtype, weight.device)
        self._linear, self._moe = make_linear(weight), moe

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Gate":
        """Read the gate of decoder layer ``layer``.

        Raises:
            CheckpointError: its tensor is missing, mis-shaped or cannot be read.
        """
        shape = (config.moe.num_experts, config.hidden_size)
        gate_dtype = torch.float32 if config.moe.float32_gate else dtype
        name = moe_prefix(checkpoint, layer) + "gate.weight"
        return cls(checkpoint.read(name, shape, gate_dtype, device), config.moe)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for the rows of ``hidden_states`` ``[T, H]``.

        Returns:
            topk_weights: float32 ``[T, k]``, normalised and scaled as the family demands, ready to
                multiply expert outputs with; topk_ids: int32 ``[T, k]``, heaviest first.
        """
        hidden_states, gate, moe = hidden_states.to(self._dtype), self._linear, self._moe
        if isinstance(gate, PackedLinear) and moe.topk_method == "greedy":
            return _choose_on_a_cpu(hidden_states.contiguous(), gate, moe)
        return select_experts(gate(hidden_states), moe)

    def before(
        self, slots: PackedSlots, layer: LayerRung | None = None
    ) -> RoutedExpertsKernel | None:
        """Combine this gate with all of the layer's experts, each in its own slot, for whole steps.

        Args:
            slots: of these experts, and behind them of the united ones that ``layer`` has.
            layer: how choices are degraded; None: there are no united experts.

        Returns:
            None if such a step cannot be one call.
        """
        gate, moe = self._linear, self._moe
        if not (isinstance(gate, PackedLinear) and moe.topk_method == "greedy"):
            return None
        return RoutedExpertsKernel(
            gate.matrix,
            slots,
            moe.top_k,
            layer or LayerRung(moe.num_experts),
            normalise=moe.norm_topk_prob,
            scaling=moe.routed_scaling_factor,
        )


def load_gates(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[int, Gate]:
    """Read the gates of all sparse layers, by decoder layer.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or cannot be read.
    """
    return {
        layer: Gate.load(checkpoint, config, layer, dtype, device) for layer in config.moe_layers
    }


def select_experts(gate_logits: Tensor, moe: MoE) -> tuple[Tensor, Tensor]:
    """Choose the top-k experts of each token from its ``gate_logits`` (any float, ``[T, E]``).

    Softmax runs over all experts in float32. Group-limited routing first keeps the ``topk_group``
    groups whose best expert scores highest (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).

    Returns:
        topk_weights: float32 ``[T, k]``; topk_ids: int32 ``[T, k]``, heaviest first.
    """
    if gate_logits.is_cuda:
        return _select_experts_on_gpu(gate_logits, moe)
    if moe.topk_method == "greedy" and usable(gate_logits):
        return _select_on_a_cpu(gate_logits.contiguous(), moe)
    scores = gate_logits.softmax(dim=-1, dtype=torch.float32)
    if moe.topk_method == "group_limited_greedy":
        grouped = scores.view(scores.shape[0], moe.n_group, -1)  # [T, G, E / G]
        _, best_groups = _largest(grouped.amax(dim=-1), moe.topk_group)  # [T, topk_group]
        kept = torch.zeros_like(grouped[..., 0]).scatter_(-1, best_groups, 1.0)
        scores = (grouped * kept.unsqueeze(-1)).flatten(-2)
    topk_weights, topk_ids = _largest(scores, moe.top_k)
    if moe.norm_topk_prob:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    if moe.routed_scaling_factor != 1.0:
        topk_weights = topk_weights * moe.routed_scaling_factor
    return topk_weights, topk_ids.to(torch.int32)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of each row and their columns; of equal ones the lowest, which ``topk`` leaves open.

    In bfloat16 logits are often equal, and machines must choose alike. The bits of numbers that are not negative order
    as they do: below them goes the column, the lowest as the largest.
    """
    columns = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    keys = (scores.contiguous().view(torch.int32).long() << 32) | columns
    largest = keys.topk(count, dim=-1).indices
    return scores.gather(-1, largest), largest


def _choose_on_a_cpu(hidden_states: Tensor, gate: PackedLinear, moe: MoE) -> tuple[Tensor, Tensor]:
    num_rows = len(hidden_states)
    assert hidden_states.shape[1] == gate.matrix.shape[1]
    topk_weights = torch.empty(num_rows, moe.top_k)
    topk_ids = torch.empty(num_rows, moe.top_k, dtype=torch.int32)
    lib().choose_experts(
        gate=gate.matrix.c,
        x=hidden_states.data_ptr(),
        count=num_rows,
        top_k=moe.top_k,
        normalise=moe.norm_topk_prob,
        scaling=moe.routed_scaling_factor,
        logits=scratch(4 * num_rows * moe.num_experts),
        weights=topk_weights.data_ptr(),
        ids=topk_ids.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return topk_weights, topk_ids


def _select_on_a_cpu(gate_logits: Tensor, moe: MoE) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = gate_logits.shape
    topk_weights = torch.empty(num_rows, moe.top_k)
    topk_ids = torch.empty(num_rows, moe.top_k, dtype=torch.int32)
    lib().select_experts(
        logits=gate_logits.data_ptr(),
        count=num_rows,
        num_experts=num_experts,
        top_k=moe.top_k,
        normalise=moe.norm_topk_prob,
        scaling=moe.routed_scaling_factor,
        weights=topk_weights.data_ptr(),
        ids=topk_ids.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return topk_weights, topk_ids


def _select_experts_on_gpu(gate_logits: Tensor, moe: MoE) -> tuple[Tensor, Tensor]:
    from moesaic.kernels.triton import gate as gate_triton

    limited = moe.topk_method == "group_limited_greedy"
    return gate_triton.select_experts(
        gate_logits,
        top_k=moe.top_k,
        num_groups=moe.n_group if limited else 1,
        topk_group=moe.topk_group if limited else 1,
        normalise=moe.norm_topk_prob,
        scaling=moe.routed_scaling_factor,
    )
