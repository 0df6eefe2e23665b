"""A question packed among siblings is, to the network, the question alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from models.training.evaluate import Tree
from models.training.network import Network, Shape
from models.training.packs import Packer

SHAPE = Shape(
    vocab_size=600, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_size=16, max_positions=1024,
)  # fmt: skip


@pytest.mark.usefixtures("few")
@torch.no_grad()
def test_siblings_do_not_see_each_other_and_keep_their_own_positions(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    network = Network(replace(SHAPE, vocab_size=4096))
    packer = Packer(tokenizer, seed=0)
    pack = next(p for p in (packer.pack(512) for _ in range(50)) if p.sibling.max() >= 3)
    hidden, _, _ = network(
        torch.from_numpy(pack.tokens)[None],
        torch.from_numpy(pack.mask())[None, None],
        torch.from_numpy(pack.position)[None],
    )
    document = int(pack.document[np.argmax(pack.sibling)])

    for sibling in (1, 2, 3):
        own = (pack.document == document) & ((pack.sibling == 0) | (pack.sibling == sibling))
        alone = torch.from_numpy(pack.tokens[own])[None]
        length = alone.shape[1]
        expected, _, _ = network(
            alone, torch.ones(length, length).tril().bool()[None, None], torch.arange(length)[None]
        )
        torch.testing.assert_close(hidden[0, own], expected[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_tree_gives_each_path_the_log_probability_it_has_alone() -> None:
    torch.manual_seed(0)
    network = Network(SHAPE)
    tree = Tree()
    paths = [[5, 6, 7], [5, 6, 8, 9], [5, 10]]
    nodes = [tree.extend(-1, path) for path in paths]

    logprobs = tree.run(network).logprobs()

    assert len(tree.tokens) == 6
    for path, on_path in zip(paths, nodes, strict=True):
        tokens = torch.tensor(path)[None]
        mask = torch.ones(len(path), len(path)).tril().bool()[None, None]
        hidden, _, _ = network(tokens, mask, torch.arange(len(path))[None])
        rows = network.logits(hidden[0]).log_softmax(-1)
        expected = [float(rows[i, token]) for i, token in enumerate(path[1:])]
        torch.testing.assert_close(logprobs[on_path[1:]], torch.tensor(expected))
