# Gating: from the gate's logits to chosen experts and their weights.
#   Order      the best first, by score and correction; of equal ones the lowest expert, which ``topk`` leaves open.
#   Reference  select_reference; on a GPU moesaic.kernels.triton.gate.
"""The choice of experts by the logits of a gate."""

import ctypes

import torch
from torch import Tensor

from moesaic.kernels.packed_matrix import PackedMatrix
from moesaic.models.configuration.architecture import MoE
from moesaic.native.library import lib, scratch, usable
from moesaic.native.structs import GatingArgs

BEST_OF_A_GROUP = {"greedy": 1, "group_limited_greedy": 1, "noaux_tc": 2}
"""By ``topk_method``, how many of its best experts together make the score of a group."""


class Gating:
    """The way in which one gate chooses."""

    def __init__(self, moe: MoE, correction: Tensor | None = None) -> None:
        """Take the rules, and each expert's correction, float32 ``[E]``, where the model has one."""
        assert moe.correction_bias == (correction is not None)
        self.moe, self.correction, self.top_k = moe, correction, moe.top_k
        self._num_groups = moe.n_group if moe.group_limited else 1
        self._kept_groups = moe.topk_group if moe.group_limited else 1
        self._group_best = BEST_OF_A_GROUP[moe.topk_method]
        on_host = correction is not None and correction.device.type == "cpu"
        self.c = GatingArgs(  # points into the correction
            correction=correction.data_ptr() if correction is not None and on_host else None,
            num_groups=self._num_groups,
            kept_groups=self._kept_groups,
            group_best=self._group_best,
            scaling=moe.routed_scaling_factor,
            epsilon=moe.norm_epsilon,
            least=moe.norm_least,
            normalise=moe.norm_topk_prob,
            sigmoid=moe.scoring_func == "sigmoid",
        )

    def choose(self, hidden_states: Tensor, gate: PackedMatrix) -> tuple[Tensor, Tensor]:
        """Choose for rows ``[T, H]``, float32, by a gate ``H -> E`` on a CPU; see ``select``."""
        assert hidden_states.shape[1] == gate.shape[1]
        num_rows, hidden_states = len(hidden_states), hidden_states.contiguous()
        weights, ids = self._room(num_rows)
        lib().choose_experts(
            gate=gate.c,
            x=hidden_states.data_ptr(),
            count=num_rows,
            top_k=self.top_k,
            gating=ctypes.byref(self.c),
            logits=scratch(4 * num_rows * self.moe.num_experts),
            weights=weights.data_ptr(),
            ids=ids.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return weights, ids

    def select(self, gate_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by logits, any float ``[T, E]``.

        Returns:
            topk_weights: float32 ``[T, k]``; topk_ids: int32 ``[T, k]``, the best first.
        """
        if gate_logits.is_cuda:
            return self.select_on_gpu(gate_logits)
        if not usable(gate_logits):
            return self.select_reference(gate_logits)
        logits = gate_logits.clone(memory_format=torch.contiguous_format)
        weights, ids = self._room(len(logits))
        lib().select_experts(
            logits=logits.data_ptr(),
            count=len(logits),
            num_experts=self.moe.num_experts,
            top_k=self.top_k,
            gating=ctypes.byref(self.c),
            weights=weights.data_ptr(),
            ids=ids.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return weights, ids

    def select_on_gpu(self, gate_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as ``select`` does, with a Triton kernel."""
        from moesaic.kernels.triton import gate

        moe = self.moe
        return gate.select_experts(
            gate_logits,
            top_k=moe.top_k,
            correction=self.correction,
            num_groups=self._num_groups,
            topk_group=self._kept_groups,
            group_best=self._group_best,
            sigmoid=moe.scoring_func == "sigmoid",
            normalise=moe.norm_topk_prob,
            epsilon=moe.norm_epsilon,
            least=moe.norm_least,
            scaling=moe.routed_scaling_factor,
        )

    def select_reference(self, gate_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as ``select`` does, in torch's own operations.

        Groups are those of DeepSeek-V2 (arXiv:2405.04434, section 2.2.2) or of DeepSeek-V3 (arXiv:2412.19437,
        section 2.1.2), with its corrections.
        """
        moe, logits = self.moe, gate_logits.float()
        scores = logits.sigmoid() if moe.scoring_func == "sigmoid" else logits.softmax(dim=-1)
        ranks = scores if self.correction is None else scores + self.correction
        if moe.group_limited:
            grouped = ranks.view(len(ranks), moe.n_group, -1)  # [T, G, E / G]
            best = grouped.topk(min(self._group_best, grouped.shape[2]), dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(-1, _largest(best, moe.topk_group), True)
            ranks = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        topk_ids = _largest(ranks, moe.top_k)
        weights = scores.gather(-1, topk_ids)
        if moe.norm_topk_prob:
            total = weights.sum(dim=-1, keepdim=True).clamp(min=moe.norm_least)
            weights = weights / (total + moe.norm_epsilon)
        return weights * moe.routed_scaling_factor, topk_ids.to(torch.int32)

    def _room(self, num_rows: int) -> tuple[Tensor, Tensor]:
        shape = num_rows, self.top_k
        return torch.empty(shape), torch.empty(shape, dtype=torch.int32)


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Return the columns of the ``count`` largest of each row, float32; of equal ones the lowest.

    In bfloat16 logits are often equal, and machines must choose alike. The bits of floats order as they do, if those
    behind the sign are turned round in negative ones; below them goes the column, the lowest as the largest.
    """
    columns = torch.arange(numbers.shape[1] - 1, -1, -1, device=numbers.device)
    bits = numbers.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ordered.long() << 32) | columns).topk(count, dim=-1).indices
