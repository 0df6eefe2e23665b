"""Attention that is told where to look: at what a question is answered from.

A head that goes from a question to the one sentence that answers it takes thousands of steps to
form. Finding the sentence brings no reward before its word can be said, and saying the word none
before it is found. The curriculum knows the position of the answer (``looks.py``). So training adds
a loss that makes the heads of two layers attend there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.training.fused import heads_of, rms_norm
from models.training.looks import Kind
from models.training.network import Block, Network
from models.training.packs import Pack

# Behind the layer that knows whom a sentence is about, and behind the one that has the word in mind.
LAYERS: dict[Kind, int] = {"told": 3, "listed": 5, "said": 4}
KEY_HEAD = 1


def to_looks(packs: Sequence[Pack], device: torch.device) -> dict[str, Tensor]:
    """Stack the looks of packs: of each kind, ``N`` looks' packs and ends ``[N, 2]``, and bool ``[N, T]``."""
    found = {}
    for kind in LAYERS:
        looks = [(i, k) for i, pack in enumerate(packs) for k in pack.looks if k.kind == kind]
        at = np.zeros((len(looks), len(packs[0].tokens)), dtype=bool)
        for row, (_, look) in zip(at, looks, strict=True):
            row[look.at] = True
        rows = np.array([(i, look.end) for i, look in looks], dtype=np.int64).reshape(-1, 2)
        found[f"{kind}_rows"] = torch.from_numpy(rows).to(device)
        found[f"{kind}_at"] = torch.from_numpy(at).to(device)
    return found


def evidence_losses(
    network: Network, tapped: Sequence[Tensor], batch: dict[str, Tensor]
) -> dict[Kind, Tensor]:
    """Mean negative log of the attention that questions pay to their evidence, of each kind that there is.

    Args:
        network: gives the layers' weights.
        tapped: the residual stream behind every layer, ``[B, T, H]``.
        batch: as ``to_batch`` makes it.
    """
    return {
        kind: _missed(network, layer, tapped[layer - 1], batch, kind)
        for kind, layer in LAYERS.items()
        if len(batch[f"{kind}_rows"])
    }


def _missed(
    network: Network, layer: int, stream: Tensor, batch: dict[str, Tensor], kind: Kind
) -> Tensor:
    block = network.layers[layer]
    assert isinstance(block, Block)
    shape, heads = network.shape, block.self_attn
    size, groups = shape.head_dim, shape.num_heads // shape.num_kv_heads
    pack, end = batch[f"{kind}_rows"].unbind(dim=1)
    normed = rms_norm(stream, block.input_layernorm.weight, shape.rms_eps)
    positions = batch["positions"]
    cos, sin = network.cos[positions].unsqueeze(2), network.sin[positions].unsqueeze(2)
    own = slice(KEY_HEAD * size, (KEY_HEAD + 1) * size)
    key = F.linear(normed, heads.k_proj.weight[own]).unsqueeze(2)
    key = heads_of(key, heads.k_norm.weight, cos, sin, shape.rms_eps, 1)[:, 0]
    asking = heads.q_proj.weight[own.start * groups : own.stop * groups]
    query = F.linear(normed[pack, end], asking).view(1, -1, groups, size)
    at = cos[pack, end].unsqueeze(0), sin[pack, end].unsqueeze(0)
    query = heads_of(query, heads.q_norm.weight, *at, shape.rms_eps, 1)[0].transpose(0, 1)
    scores = query @ key[pack].transpose(1, 2) * size**-0.5
    seen = batch["mask"][pack, 0, end].unsqueeze(1)
    every = scores.masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
    right = scores.masked_fill(~batch[f"{kind}_at"].unsqueeze(1), -torch.inf).logsumexp(dim=-1)
    missed: Tensor = (every - right).mean()
    return missed
