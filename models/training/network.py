"""The trainable form of the demo network: Qwen3-MoE with autograd, no KV cache, parameters named as
in HF files.

Serving has its own, inference-only layers (``moesaic.models``); parity of the two is tested on the
exported files.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.fused import (
    Span,
    add_rms_norm,
    attention,
    heads_of,
    rms_norm,
    routed_experts,
    spans_of,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of the shipped demo's successor."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    num_experts: int = 32
    top_k: int = 4
    expert_size: int = 64
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    max_positions: int = 2048

    def hf_config(self, special: dict[str, int | None]) -> dict[str, object]:
        """The ``config.json`` that makes any Qwen3-MoE implementation load the exported file."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.expert_size * self.top_k,
            "moe_intermediate_size": self.expert_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.max_positions,
            "torch_dtype": "bfloat16",
            **special,
        }


class Attention(nn.Module):
    """Grouped-query attention with per-head query and key norms, over an arbitrary mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_eps)

    def forward(
        self, x: Tensor, bias: Tensor, spans: list[Span], cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Mix ``x`` ``[B, T, H]`` as ``bias`` (float ``[B, 1, T, T]``, 0 or -inf) and its spans let it.

        ``cos`` and ``sin`` are ``[B, T, 1, head_dim / 2]``.
        """
        size, groups = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        query, key, value = (
            projection(x).unflatten(-1, (-1, size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        eps = self.shape.rms_eps
        mixed = attention(
            heads_of(query, self.q_norm.weight, cos, sin, eps, 1),
            heads_of(key, self.k_norm.weight, cos, sin, eps, groups),
            value.transpose(1, 2).repeat_interleave(groups, dim=1),
            bias,
            spans,
        )
        out: Tensor = self.o_proj(mixed)
        return out


class Experts(nn.Module):
    """The gate and the routed experts of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        num, hidden, inner = shape.num_experts, shape.hidden_size, shape.expert_size
        self.gate_up = nn.Parameter(torch.randn(num, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(
            torch.randn(num, hidden, inner) * inner**-0.5 / (2 * shape.num_layers) ** 0.5
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [N, H]`` to the experts' sum ``[N, H]``, the balance loss, and the chosen ids ``[N,
        k]``."""
        probs = self.gate(x).float().softmax(dim=-1)
        weights, ids = probs.topk(self.shape.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        combined = routed_experts(x, ids, weights.to(x.dtype), self.gate_up, self.down)
        counts = torch.bincount(ids.flatten(), minlength=self.shape.num_experts)
        share = counts.float() / ids.numel()
        balance = self.shape.num_experts * (share * probs.mean(dim=0)).sum()
        return combined, balance, ids


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.rms_eps
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_eps)
        self.mlp = Experts(shape)

    def forward(
        self, x: Tensor, bias: Tensor, spans: list[Span], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[B, T, H]`` in and out, with the layer's balance loss and expert ids."""
        normed = rms_norm(x, self.input_layernorm.weight, self.eps)
        mixed = self.self_attn(normed, bias, spans, cos, sin)
        x, normed = add_rms_norm(x, mixed, self.post_attention_layernorm.weight, self.eps)
        routed, balance, ids = self.mlp(normed.flatten(0, 1))
        return x + routed.view_as(x), balance, ids


class Network(nn.Module):
    """The whole language model; embeddings and head are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        blocks = [Block(shape) for _ in range(shape.num_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_eps)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden_size**-0.5)
        for block in blocks:
            nn.init.normal_(
                block.self_attn.o_proj.weight,
                std=(2 * shape.num_layers * shape.hidden_size) ** -0.5,
            )
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).float(), inverse)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, tapped: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Hidden states before the head ``[B, T, H]``, the mean balance loss, and expert ids per
        layer.

        Args:
            tokens: int64 ``[B, T]``.
            mask: bool ``[B, 1, T, T]``, true where a query may see a key.
            positions: int64 ``[B, T]``.
            tapped: gets the residual stream behind every layer, ``[B, T, H]``.
        """
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, -torch.inf)
        spans = spans_of(mask)
        balances, ids = [], []
        for block in self.layers:
            x, balance, chosen = block(x, bias, spans, cos, sin)
            balances.append(balance)
            ids.append(chosen)
            if tapped is not None:
                tapped.append(x)
        return rms_norm(x, self.norm.weight, self.shape.rms_eps), torch.stack(balances).mean(), ids

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits for rows of hidden states."""
        return F.linear(hidden, self.embed_tokens.weight)

    def hf_tensors(self) -> dict[str, Tensor]:
        """All weights in bfloat16 under the names that HF's Qwen3-MoE files use, one tensor per
        expert."""
        out: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            tensor = tensor.detach().to("cpu", torch.bfloat16)
            stem = f"model.{name}"
            if name.endswith("mlp.gate_up"):
                for expert, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    prefix = f"{stem.removesuffix('gate_up')}experts.{expert}"
                    out[f"{prefix}.gate_proj.weight"] = gate.contiguous()
                    out[f"{prefix}.up_proj.weight"] = up.contiguous()
            elif name.endswith("mlp.down"):
                for expert, down in enumerate(tensor):
                    out[f"{stem.removesuffix('down')}experts.{expert}.down_proj.weight"] = (
                        down.contiguous()
                    )
            else:
                out[stem] = tensor.contiguous()
        return out

    @torch.no_grad()
    def load_hf(self, directory: Path) -> None:
        """Read the weights that ``hf_tensors`` wrote, so that training can go on from them.

        Raises:
            KeyError: a weight of this shape is missing.
        """
        from safetensors.torch import load_file

        tensors = load_file(directory / "model.safetensors")
        for name, parameter in self.named_parameters():
            stem = f"model.{name}"
            if name.endswith("mlp.gate_up"):
                prefix = f"{stem.removesuffix('gate_up')}experts"
                for expert, both in enumerate(parameter):
                    halves = [tensors[f"{prefix}.{expert}.{p}_proj.weight"] for p in ("gate", "up")]
                    both.copy_(torch.cat(halves))
            elif name.endswith("mlp.down"):
                prefix = f"{stem.removesuffix('down')}experts"
                for expert, down in enumerate(parameter):
                    down.copy_(tensors[f"{prefix}.{expert}.down_proj.weight"])
            else:
                parameter.copy_(tensors[stem])
