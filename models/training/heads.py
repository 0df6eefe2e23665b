"""Attention heads that look back and copy, laid into a fresh network.

A network of this size needs thousands of steps before a first head attends to the previous token.
Copying, looking up a letter and recalling a fact all depend on such a head. So two pairs of heads
are initialised by hand. One pair of the first layer attends to the tokens one and two before. One
pair of the second layer attends to the token that followed an earlier occurrence of the present
one. Training changes them as all others.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.training.network import Attention, Block, Network

CONSTANT = 0.25  # of every embedding, in one dimension: what does not depend on the token
PREVIOUS_PAIRS = (
    0.7,
    0.55,
    0.45,
)  # amplitude of the fastest rotations; their sum peaks at one offset
SHARPNESS = 2.0  # of the norms' weights in the dimensions used
HANDED_ON, COPY_GAIN = 0.2, 2.0
SHARED = 0.8  # of the embeddings of one word's tokens


@torch.no_grad()
def lay_heads(network: Network) -> None:
    """Make the first heads of the first two layers look back, and two more of the second copy."""
    network.embed_tokens.weight[:, 0] = CONSTANT
    blocks = [block for block in network.layers if isinstance(block, Block)]
    first, second = blocks[0].self_attn, blocks[1].self_attn
    for attention in (first, second):
        _attend_before(attention, network.shape.rope_theta)
    _copy_what_followed(first, second)


@torch.no_grad()
def share_beginnings(network: Network, tokenizer: Tokenizer) -> None:
    """Let a word begin alike with and without a space before it, and with a capital.

    An answer starts without the space that the same word has in a text: copying one for the other
    would have to be learned word by word.
    """
    embedding = network.embed_tokens.weight
    by_word: dict[str, list[int]] = {}
    for token, token_id in tokenizer.get_vocab().items():
        by_word.setdefault(token.lstrip("Ġ").lower(), []).append(token_id)
    for word, ids in by_word.items():
        if len(word) > 1 and len(ids) > 1:
            common = embedding[ids].mean(dim=0) * len(ids) ** 0.5
            embedding[ids] = SHARED * common + (1 - SHARED**2) ** 0.5 * embedding[ids]


def slow_dimensions(size: int) -> list[int]:
    """The dimensions of a head that rotations turn the least."""
    half, first = size // 2, size // 2 * 7 // 16
    return [*range(first, half), *range(half + first, size)]


def _attend_before(attention: Attention, theta: float) -> None:
    """Let key head 0 with its query heads attend to the tokens one, two … positions before."""
    size = attention.shape.head_dim
    half = size // 2
    turns = theta ** -(torch.arange(len(PREVIOUS_PAIRS)) * 2 / size)
    amplitude = torch.tensor(PREVIOUS_PAIRS)

    def turned(angle: Tensor) -> Tensor:
        vector = torch.zeros(size)
        vector[: len(PREVIOUS_PAIRS)] = amplitude * angle.cos()
        vector[half : half + len(PREVIOUS_PAIRS)] = amplitude * angle.sin()
        return vector

    groups = attention.shape.num_heads // attention.shape.num_kv_heads
    for offset in range(1, groups + 1):
        rows = attention.q_proj.weight[(offset - 1) * size : offset * size]
        rows.zero_()
        rows[:, 0] = turned((1 - offset) * turns)
    keys = attention.k_proj.weight[:size]
    keys.zero_()
    keys[:, 0] = turned(turns)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[: len(PREVIOUS_PAIRS)] = SHARPNESS
        norm.weight[half : half + len(PREVIOUS_PAIRS)] = SHARPNESS


def _copy_what_followed(first: Attention, second: Attention) -> None:
    """Let key head 1 of the second layer match the present token with the one before a key.

    The first layer's head passes on a few numbers of the previous token. The second compares them
    with the same numbers of the present token, in the dimensions that rotations turn least.
    """
    shape = first.shape
    size, width = shape.head_dim, shape.hidden_size
    groups = shape.num_heads // shape.num_kv_heads
    slow = slow_dimensions(size)
    basis = torch.linalg.qr(torch.randn(width - 1, width - 1)).Q
    read, written, copied = (
        basis[:, :size].T,
        basis[:, size : 2 * size],
        basis[:, 2 * size : 3 * size],
    )
    first.v_proj.weight[:size, 0] = 0
    first.v_proj.weight[:size, 1:] = read
    for head in range(min(2, groups)):
        place = basis[:, (1 + 2 * head) * size : (2 + 2 * head) * size]
        first.o_proj.weight[1:, head * size : (head + 1) * size] = HANDED_ON * place
    key, query = second.k_proj.weight[size : 2 * size], second.q_proj.weight[groups * size :]
    key.zero_()
    key[slow, 1:] = written.T[slow]
    value = second.v_proj.weight[size : 2 * size]
    value[:, 0] = 0
    value[:, 1:] = copied.T
    for head in range(groups):
        rows = query[head * size : (head + 1) * size]
        rows.zero_()
        rows[slow, 1:] = read[slow]
        place = (groups + head) * size
        second.o_proj.weight[1:, place : place + size] = COPY_GAIN * copied / groups
    for norm in (second.q_norm, second.k_norm):
        norm.weight[slow] = SHARPNESS
