"""Attention that is told where to look: at what a question is answered from.

A head that goes from a question to the one sentence that answers it takes thousands of steps to form:
nothing rewards finding the sentence before its word can be said, nor saying the word before it is
found. The curriculum knows where the answer stands. Training therefore asks the heads of one layer
to attend there, beside all that it asks of the network's words.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from models.training.fused import heads_of, rms_norm
from models.training.network import Block, Network

EVIDENCE_LAYER, KEY_HEAD = 3, 1  # behind the layer that knows whom a sentence is about
LONGEST_WORD = 4  # tokens


def continuing(tokenizer: Tokenizer) -> Tensor:
    """Tell which tokens go on with a word or a number, bool ``[V]``."""
    found = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
    for token, token_id in tokenizer.get_vocab().items():
        found[token_id] = token.isalnum()
    return found


def evidence_of(batch: dict[str, Tensor], continues: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find where questions are answered: their packs ``[N]``, ends ``[N]`` and evidence ``[N, T]``.

    A name is found at the end of the sentences that are about its person, where all of such a
    sentence is known; another word where it stands. A question without evidence is left out.
    """
    pack, end = (batch["hint"] >= 0).nonzero(as_tuple=True)
    wanted = batch["hint"][pack, end].unsqueeze(1)
    seen = batch["mask"][pack, 0, end] & (batch["sibling"][pack] == 0)
    told = (batch["subject"][pack] == wanted) & seen
    stands = (batch["tokens"][pack] == wanted) & seen
    goes_on = continues[batch["tokens"][pack]] & seen
    for _ in range(LONGEST_WORD - 1):
        stands |= F.pad(stands[:, :-1], (1, 0)) & goes_on
    evidence = torch.where(told.any(dim=1, keepdim=True), told, stands)
    some = evidence.any(dim=1)
    return pack[some], end[some], evidence[some]


def evidence_loss(
    network: Network, stream: Tensor, batch: dict[str, Tensor], continues: Tensor
) -> Tensor | None:
    """Mean negative log of the attention that questions pay to their evidence; None without any.

    Args:
        network: gives the layer's weights.
        stream: the residual stream before ``EVIDENCE_LAYER``, ``[B, T, H]``.
        batch: as ``to_batch`` makes it.
        continues: what ``continuing`` says.
    """
    pack, end, evidence = evidence_of(batch, continues)
    if not len(pack):
        return None
    block = network.layers[EVIDENCE_LAYER]
    assert isinstance(block, Block)
    shape, heads = network.shape, block.self_attn
    size, groups = shape.head_dim, shape.num_heads // shape.num_kv_heads
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
    right = scores.masked_fill(~evidence.unsqueeze(1), -torch.inf).logsumexp(dim=-1)
    missed: Tensor = (every - right).mean()
    return missed
