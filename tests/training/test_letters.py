"""The head that looks letters up is fitted to the network's own states, and changes no other."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from models.training import corpus, letters
from models.training.letters import HINT_LAYER, lay_letter_head
from models.training.network import Block, Network, Shape


def test_one_key_head_and_its_queries_of_one_layer_are_laid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(letters, "NUM_GROUPS", 30)
    torch.manual_seed(0)
    shape = Shape(num_experts=4, expert_size=16)
    network, before = Network(shape), Network(shape)
    before.load_state_dict(network.state_dict())
    tokenizer = Tokenizer.from_file(str(Path(corpus.__file__).parents[1] / "demo/tokenizer.json"))

    lay_letter_head(network, tokenizer)

    changed = {n for n, p in network.state_dict().items() if not p.equal(before.state_dict()[n])}
    stem = f"layers.{HINT_LAYER + 1}.self_attn."
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    assert changed == {f"{stem}{part}.weight" for part in parts}
    ours, theirs = (n.layers[HINT_LAYER + 1] for n in (network, before))
    assert isinstance(ours, Block)
    assert isinstance(theirs, Block)
    moved = (ours.self_attn.k_proj.weight - theirs.self_attn.k_proj.weight).abs().sum(1) > 0
    assert moved.nonzero().flatten().tolist() == list(range(shape.head_dim, 2 * shape.head_dim))
    assert all(torch.isfinite(p).all() for p in network.parameters())


def test_fitted_reads_match_what_two_states_have_in_common() -> None:
    torch.manual_seed(0)
    words = torch.randn(500, 8)
    asking = words @ torch.randn(8, 64) + 0.1 * torch.randn(500, 64)
    option = words @ torch.randn(8, 64) + 0.1 * torch.randn(500, 64)
    read_asking, read_option = letters.matched(asking, option, 8)

    asked, options = (F.normalize(x) for x in (asking @ read_asking.T, option @ read_option.T))
    scores = asked @ options.T  # the norms of queries and keys do as much
    assert (scores.argmax(dim=1) == torch.arange(500)).float().mean() > 0.8
