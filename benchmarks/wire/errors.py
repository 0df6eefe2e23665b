"""Errors of a layer's sums and of logits, by the form in which rows and sums travel."""

import asyncio
import gzip
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.models import qwen3_moe, write_model
from benchmarks.common.placements import placed_worker
from benchmarks.common.suite import DEMO
from benchmarks.parity.cases import CPU, Served
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.frames import FLOAT32_SUMS
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.text.tokenizer import Tokenizer
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import Frame, FrameLimits

TEXT = Path(__file__).parents[2] / "models/training/data/text/wikitext2.test.txt.gz"
SHAPES = {  # Qwen3-MoE, random; the widths and the experts per token of Qwen3-30B-A3B
    "random, 2048 wide": qwen3_moe(
        vocab_size=512,
        hidden_size=2048,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=512,
    ),
    "random, 512 wide, 12 layers": qwen3_moe(
        vocab_size=512,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
    ),
}
WORKERS, TOKENS, QUICK_TOKENS = 2, 256, 64
BLOCK_TOKENS = 8  # of ``Served``


@dataclass(frozen=True)
class WireForm:
    """One way for rows and sums to travel."""

    dtype: torch.dtype
    wire: WireDtype
    float32_sums: bool = False  # as bfloat16 rows had them before


FORMS = {
    "float32": WireForm(torch.float32, "own"),
    "float32, int8": WireForm(torch.float32, "int8"),
    "bfloat16, sums float32": WireForm(torch.bfloat16, "own", float32_sums=True),
    "bfloat16": WireForm(torch.bfloat16, "own"),
    "bfloat16, int8": WireForm(torch.bfloat16, "int8"),
}


def measured_errors(quick: bool) -> dict[str, Any]:
    """Measure the demo model on text, and random models on random tokens."""
    tokens = QUICK_TOKENS if quick else TOKENS
    text = gzip.decompress(TEXT.read_bytes()).decode()[: 16 * tokens]
    figures = {"demo": _errors_of(DEMO, Tokenizer.load(DEMO).encode(text)[:tokens])}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), shape, seed=7)
            random = torch.Generator().manual_seed(5)
            drawn = torch.randint(shape["vocab_size"], (tokens,), generator=random)
            figures[name] = _errors_of(Path(directory), drawn.tolist())
        if quick:
            break
    return figures


def _errors_of(model: Path, tokens: list[int]) -> dict[str, Any]:
    """Compare every form with float32 in one process, and with its own dtype in one process."""
    local = {dtype: Served(model, dtype) for dtype in (torch.float32, torch.bfloat16)}
    alone = {dtype: _logits(served, tokens) for dtype, served in local.items()}
    exact = alone[torch.float32]
    figures: dict[str, Any] = {"bfloat16, one process": _difference(alone[torch.bfloat16], exact)}
    wide: Tensor | None = None
    for name, form in FORMS.items():
        logits, layer = asyncio.run(_routed(model, local[form.dtype], form, tokens))
        found = {**_difference(logits, exact), "layer": layer}
        if form.dtype is torch.bfloat16:
            wide = logits if form.float32_sums else wide
            found["to_one_process"] = _difference(logits, alone[form.dtype])["logits"]
            assert wide is not None
            found["to_float32_sums"] = _difference(logits, wide)["logits"]
        figures[name] = found
    return figures


def _logits(served: Served, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return served.forward([(tokens, 0, _table(tokens))])


def _table(tokens: list[int]) -> list[int]:
    return list(range(-(-len(tokens) // BLOCK_TOKENS)))


async def _routed(
    model: Path, served: Served, form: WireForm, tokens: list[int]
) -> tuple[Tensor, float]:
    """Logits with experts behind frames, and the error of layers' sums for the rows that come."""
    async with _dispatcher(model, form) as dispatcher:
        step, off, whole = dispatcher.begin_step(), 0.0, 0.0

        async def moe(layer: int, hidden: Tensor) -> Tensor:
            nonlocal off, whole
            sums = await dispatcher.dispatch(step, layer, hidden)
            right = await served.moe(layer, hidden)
            off += float((sums.float() - right.float()).square().sum())
            whole += float(right.float().square().sum())
            return sums

        batch = served.batch([(tokens, 0, _table(tokens))])
        with torch.inference_mode():
            logits = await served.decoder.forward(batch, served.cache, moe)
        dispatcher.end_step(step)
        return logits, _rounded((off / whole) ** 0.5)


@asynccontextmanager
async def _dispatcher(model: Path, form: WireForm) -> AsyncIterator[RoutedDispatcher]:
    config, checkpoint, hub = load_config(model), Checkpoint(model), Hub()
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    experts, layers = config.moe.num_experts, list(config.moe_layers)
    networks = [InProcessNetwork(f"expert-{n}", b"bench", limits, hub) for n in range(WORKERS)]
    hosts = [
        ExpertHost(checkpoint, config, f"expert-{n}", experts, form.dtype, CPU)
        for n in range(WORKERS)
    ]
    placed = [
        placed_worker(
            f"expert-{n}", await network.listen("memory", 0, partial(_answer, host, form))
        )
        for n, (network, host) in enumerate(zip(networks, hosts, strict=True))
    ]
    slots = [[list(range(n, experts, WORKERS)) for n in range(WORKERS)] for _ in layers]
    placement = Placement(
        epoch=1,
        model_digest=config.digest,
        num_experts=experts,
        workers=placed,
        layers=layers,
        slots=slots,
    )
    for host in hosts:
        host.loader.prepare(placement)
        host.epochs.commit(1)
    client = InProcessNetwork("attention-0", b"bench", limits, hub)
    gates = load_gates(checkpoint, config, form.dtype, CPU)
    dispatcher = RoutedDispatcher(client, gates, 60.0, wire=form.wire)
    dispatcher.set_placement(placement)
    await dispatcher.reachable()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        for network in (client, *networks):
            await network.close()


def _answer(host: ExpertHost, form: WireForm, request: Frame) -> Frame:
    if form.float32_sums:
        request = replace(request, flags=request.flags | FLOAT32_SUMS)
    return host.answers.answer(request)


def _difference(logits: Tensor, exact: Tensor) -> dict[str, float]:
    same = (logits.argmax(1) == exact.argmax(1)).float().mean()
    return {
        "logits": _rounded(float((logits - exact).norm() / exact.norm())),
        "top1": round(float(same), 4),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
