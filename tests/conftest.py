"""A tiny random Qwen3-MoE checkpoint, and the network it was exported from as an independent
reference."""

import json
import os
import signal
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.training.network import Network, Shape

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: commands under test would inherit it, and take no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start processes by the hundred: each would compile what the one before it has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, be it by torch: here kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

TINY = Shape(
    vocab_size=160,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_size=16,
    max_positions=512,
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what the suites of processes it used have logged."""
    report = yield
    if report.failed:
        for name, used in getattr(item, "funcargs", {}).items():
            # Not by its class, whose imports the machine of `make gpu` may lack.
            if hasattr(used, "story"):
                with suppress(OSError, ValueError):  # of a suite that has ended
                    report.sections.append((f"suite {name}", used.story()))
    return report


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint directory and its reference."""

    directory: Path
    network: Network

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Reference logits ``[T, V]`` of one sequence, by one forward pass without a cache."""
        length = len(tokens)
        mask = torch.ones(length, length).tril().bool()[None, None]
        hidden, _, _ = self.network(torch.tensor(tokens)[None], mask, torch.arange(length)[None])
        return self.network.logits(hidden[0])

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Reference continuation by ``count`` tokens."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[-count:]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Random weights, scaled so that logits and gates are far from uniform."""
    torch.manual_seed(7)
    network = Network(TINY).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = 3.0 if "gate.weight" in name else 1.5
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
            parameter.copy_(parameter.bfloat16().float())  # what the exported file holds
    directory = tmp_path_factory.mktemp("tiny-moe")
    config = TINY.hf_config({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    (directory / "config.json").write_text(json.dumps(config))
    save_file(network.hf_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(directory, network)
