"""A head that looks a letter up, laid into a network that already finds the word behind it.

Where a question is to be answered by a letter, the network must find the word to be said, the option
that is this word, and the letter before it. Hints make a middle layer find the word. The head that
goes from there to the letter takes thousands of steps to form, since nothing rewards a part of it.
It is therefore fitted by regression, once, to the states of the network's own middle layer, and
trained on as everything else.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.training import corpus
from models.training.curriculum import copying
from models.training.curriculum.items import Group, Question
from models.training.curriculum.questions import asked_about
from models.training.curriculum.stories import short_story
from models.training.heads import SHARPNESS, slow_dimensions
from models.training.network import Block, Network

HINT_LAYER = 4  # asked for the word; the head is in the next one
NUM_GROUPS, OTHERS, LETTER_RANK = 450, 6, 12
SHRINKAGE, COMMON_DIRECTIONS = 0.3, 8
LETTER_GAIN, LETTER_SHARPNESS = 2.5, 2 * SHARPNESS


@dataclass(frozen=True)
class States:
    """Normed states where the head reads, one row for each question.

    Attributes:
        asking: at the end of the question, ``[N, H]``.
        option: at the right option, ``[N, H]``.
        others: at tokens drawn at random, ``[M, H]``.
        letters: token ids of the right letters, int64 ``[N]``.
        size: mean length of the residual stream at the end of a question.
    """

    asking: Tensor
    option: Tensor
    others: Tensor
    letters: Tensor
    size: float


@torch.no_grad()
def lay_letter_head(network: Network, tokenizer: Tokenizer, seed: int = 0) -> None:
    """Fit key head 1 of the layer behind ``HINT_LAYER`` to find options by their word, and say letters."""
    shape = network.shape
    late = _block(network, HINT_LAYER + 1).self_attn
    states = _states(network, tokenizer, seed)
    free = _without_common(states)
    size, groups = shape.head_dim, shape.num_heads // shape.num_kv_heads
    own, queries = slice(size, 2 * size), slice(groups * size, 2 * groups * size)
    slow = slow_dimensions(size)
    read_asking, read_option = matched(states.asking @ free, states.option @ free, len(slow))
    late.k_proj.weight[own] = 0
    late.k_proj.weight[own][slow] = read_option @ free
    late.q_proj.weight[queries] = 0
    for head in range(groups, 2 * groups):
        late.q_proj.weight[head * size : (head + 1) * size][slow] = read_asking @ free
    taken, said = _letters(network, states.option @ free, states)
    late.v_proj.weight[own] = 0
    late.v_proj.weight[own][:LETTER_RANK] = taken
    written = torch.zeros(shape.hidden_size, size)
    written[:, :LETTER_RANK] = said
    late.o_proj.weight[:, queries] = LETTER_GAIN * written.repeat(1, groups) / groups
    for norm in (late.q_norm, late.k_norm):
        norm.weight[slow] = LETTER_SHARPNESS


def _block(network: Network, layer: int) -> Block:
    block = network.layers[layer]
    assert isinstance(block, Block)
    return block


def _questions(seed: int) -> Iterator[tuple[Group, Question]]:
    rng = random.Random(f"letters {seed}")
    for number in range(NUM_GROUPS):
        group = (
            copying.look_up(rng, "train"),
            copying.recall(rng, "train"),
            asked_about(short_story(rng, "train")),
        )[number % 3]
        yield from ((group, question) for question in group.questions if question.form == "letter")


def _states(network: Network, tokenizer: Tokenizer, seed: int) -> States:
    """Run letter questions up to the layer that the head is in."""
    norm = _block(network, HINT_LAYER + 1).input_layernorm
    asking, option, others, letters, sizes = [], [], [], [], []
    for group, question in _questions(seed):
        text = corpus.USER_HEAD + group.head + question.tail + corpus.ASSISTANT_HEAD
        encoded = tokenizer.encode(text, add_special_tokens=False)
        place = text.rindex(f"\n{question.answer}. ") + len(f"\n{question.answer}. ")
        at = next(i for i, (_, end) in enumerate(encoded.offsets) if end > place)
        length, tapped = len(encoded.ids), list[Tensor]()
        mask = torch.ones(length, length).tril().bool()[None, None]
        network(torch.tensor(encoded.ids)[None], mask, torch.arange(length)[None], tapped)
        stream = tapped[HINT_LAYER][0]
        normed = norm(stream)
        asking.append(normed[-1])
        option.append(normed[at])
        others.append(normed[torch.randint(length, (OTHERS,))])
        letters.append(tokenizer.encode(question.answer, add_special_tokens=False).ids[0])
        sizes.append(float(stream[-1].norm()))
    return States(
        torch.stack(asking),
        torch.stack(option),
        torch.cat(others),
        torch.tensor(letters),
        sum(sizes) / len(sizes),
    )


def _without_common(states: States) -> Tensor:
    """Project on what tells states apart, ``[H, H]``: all of them have most of their length in common."""
    means = torch.stack([states.asking.mean(0), states.option.mean(0), states.others.mean(0)])
    centred = states.others - states.others.mean(0)
    strongest = torch.linalg.svd(centred, full_matrices=False).Vh[:COMMON_DIRECTIONS]
    basis = torch.linalg.qr(torch.cat([means, strongest]).T).Q
    free: Tensor = torch.eye(basis.shape[0]) - basis @ basis.T
    return free


def matched(asking: Tensor, option: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Read what a question's end and its right option have in common: ``[rank, H]`` each."""
    white_asking, white_option = _whitened(asking), _whitened(option)
    common = white_asking @ (asking.T @ option / len(asking)) @ white_option
    left, strength, right = torch.linalg.svd(common)
    scale = strength[:rank].sqrt()[:, None]
    return scale * left[:, :rank].T @ white_asking, scale * right[:rank] @ white_option


def _whitened(states: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(states.T @ states / len(states))
    values = values.clamp(min=0)
    scale = (values + SHRINKAGE * values.mean()) ** -0.5
    whitened: Tensor = vectors @ torch.diag(scale) @ vectors.T
    return whitened


def _letters(network: Network, option: Tensor, states: States) -> tuple[Tensor, Tensor]:
    """Read an option's letter off its state ``[rank, H]``, and write it for the output ``[H, rank]``."""
    wanted = network.embed_tokens.weight[states.letters]
    wanted = wanted - wanted.mean(0)
    gram = option.T @ option / len(option)
    ridge = 0.05 * gram.trace() / len(gram) * torch.eye(len(gram))
    fitted = torch.linalg.solve(gram + ridge, option.T @ wanted / len(option))
    left, strength, right = torch.linalg.svd(fitted)
    root = strength[:LETTER_RANK].sqrt()
    length = (option @ fitted).norm(dim=1).mean()
    scale = states.size / network.shape.hidden_size**0.5 / length
    return (left[:, :LETTER_RANK] * root).T, scale * right[:LETTER_RANK].T * root
