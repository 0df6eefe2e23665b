"""The network's first heads look back and copy; its exported weights are read as they were written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.training import network as networks
from models.training.heads import lay_heads
from models.training.network import Network, Shape

SMALL = Shape(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_size=16,
)  # fmt: skip
WORDS = 24


@torch.no_grad()
def attended(network: Network, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Weights of every layer's heads over a text, ``[heads, T, T]`` each."""
    seen = []

    def spied(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, _: object) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
        seen.append(scores.softmax(dim=-1)[0])
        return (seen[-1] @ value[0]).transpose(0, 1).flatten(1)[None]

    monkeypatch.setattr(networks, "attention", spied)
    length = len(tokens)
    mask = torch.ones(length, length).tril().bool()[None, None]
    network(tokens[None], mask, torch.arange(length)[None])
    return seen


def test_fresh_heads_attend_to_the_token_before_and_to_what_followed_the_last_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    network = Network(Shape())
    lay_heads(network)
    words = torch.randperm(4096)[:WORDS]
    maps = attended(network, torch.cat((words, words)), monkeypatch)

    before = [float(maps[0][head].diagonal(-offset).mean()) for head, offset in ((0, 1), (1, 2))]
    assert min(before) > 0.9
    followed = [
        float(
            torch.stack([maps[1][head][i, i - WORDS + 1] for i in range(WORDS, 2 * WORDS)]).mean()
        )
        for head in (2, 3, 5)
    ]
    assert min(followed[:2]) > 2 / WORDS > followed[2]


def test_exported_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    written, read = Network(SMALL), Network(SMALL)
    save_file(written.hf_tensors(), tmp_path / "model.safetensors")
    read.load_hf(tmp_path)

    for ours, theirs in zip(written.parameters(), read.parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_file(Network(SMALL).hf_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(KeyError, match=r"layers\.2"):
        Network(Shape(**{**vars(SMALL), "num_layers": 3})).load_hf(tmp_path)
