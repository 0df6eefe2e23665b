"""Decode steps in segments by kernels: interpreted ones on a CPU, captured ones on a GPU."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.parity.cases import CASES, ParityCase, build_reference, prompt_of
from moesaic.models.layers import decode_segments
from moesaic.models.layers.decode_segments import (
    DecodeSegments,
    SegmentedDecode,
    SegmentTensors,
)
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.rope import RotaryEmbedding
from moesaic.models.layers.static_decode import DecodeShapes
from moesaic.models.layers.warm_up import experts_elsewhere, warm_up
from tests.kernels.played_graphs import played_graphs
from tests.kernels.test_whole_models import decode_batch, served_on
from tests.kernels.ways_of_a_gpu import take_the_ways_of_a_gpu

BASES = [case for case in CASES if case.name == "base"]
TABLES = [[9, 8, 7, 6, 5], [2, 0, 1, 3, 4], [10, 11, 12, 13, 14]]


def steps_in_segments(
    case: ParityCase, directory: Path, dtype: torch.dtype, device: torch.device, num_steps: int
) -> list[tuple[Tensor, Tensor]]:
    """Logits of steps of 1, 2, 3, 1, ... rows: in segments, with experts that take a copy, and whole."""
    build_reference(case, directory)
    whole, cut = (served_on(directory, dtype, device) for _ in range(2))
    segments = DecodeSegments(cut.decoder, cut.cache, max_rows=3, max_length=40)
    prompts = [prompt_of(length, seed=length) for length in (9, 25, 1)]
    for served in (whole, cut):
        served.forward([(p, 0, t) for p, t in zip(prompts, TABLES, strict=True)])

    async def experts(layer: int, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.cpu()  # as a dispatcher does that sends them
        answer = await cut.moe(layer, rows.to(device))
        return answer.cpu().to(device)

    found = []
    for step in range(num_steps):
        count = 1 + step % 3
        tokens = prompt_of(count, seed=step)
        rows = [(t, len(p), table) for t, p, table in zip(tokens, prompts, TABLES, strict=False)]
        batch = decode_batch(rows)
        assert segments.takes(batch)
        got = asyncio.run(segments.forward(batch, experts))
        found.append((got, whole.forward([([t], at, table) for t, at, table in rows])))
        for prompt, token in zip(prompts, tokens, strict=False):
            prompt.append(token)
    return found


@pytest.mark.suite  # a whole model in the interpreter
@pytest.mark.parametrize("case", BASES[1::2], ids=str)
def test_segments_of_interpreted_kernels_equal_whole_steps(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    take_the_ways_of_a_gpu(monkeypatch)

    for got, expected in steps_in_segments(
        case, tmp_path, torch.float32, torch.device("cpu"), num_steps=3
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.suite  # a whole model in the interpreter
@pytest.mark.parametrize("case", BASES[1::2], ids=str)
def test_captured_segments_read_and_write_only_what_stays_where_it_is(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("graphs are captured here, not played")
    take_the_ways_of_a_gpu(monkeypatch)
    build_reference(case, tmp_path)
    whole, cut = (served_on(tmp_path, torch.float32, torch.device("cpu")) for _ in range(2))
    for served in (whole, cut):
        served.forward([([5, 6, 7], 0, TABLES[0]), ([8], 0, TABLES[1])])
    monkeypatch.setattr(RotaryEmbedding, "rotation", RotaryEmbedding.compute)  # as on a GPU
    monkeypatch.setattr(decode_segments, "compile_kernels", lambda device, compute: None)
    tensors = SegmentTensors(cut.decoder, cut.cache, DecodeShapes(2, 24))
    step = SegmentedDecode(cut.decoder, cut.cache, tensors, num_rows=2)

    with played_graphs() as pools:
        step.capture()
        shares = bool(cut.decoder.shared(cut.config.moe_layers[0]))
        assert pools == [None, *["pool"] * (len(cut.config.moe_layers) * (1 + shares))]
        for at, tokens in enumerate([(9, 4), (3, 2), (7, 7)]):
            rows = [(tokens[0], 3 + at, TABLES[0]), (tokens[1], 1 + at, TABLES[1])][: 1 + at % 2]
            got = asyncio.run(step.forward(decode_batch(rows), cut.moe))
            expected = whole.forward([([t], position, table) for t, position, table in rows])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for layer in range(cut.config.num_layers):
        torch.testing.assert_close(
            cut.cache.rows(layer), whole.cache.rows(layer), atol=1e-5, rtol=0
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", BASES, ids=str)
def test_captured_segments_equal_whole_steps(
    case: ParityCase, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = steps_in_segments(case, tmp_path, dtype, torch.device("cuda"), num_steps=12)

    # In bfloat16 a padded batch may take other tiles, and round elsewhere.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for got, expected in found:
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.gpu
def test_steps_behind_a_warm_up_compile_nothing_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    build_reference(BASES[0], tmp_path)
    served = served_on(tmp_path, torch.bfloat16, torch.device("cuda"))
    decoder: Decoder = served.decoder
    asyncio.run(warm_up(decoder, served.moe, 32, 7, served.cache.block_size))
    compiled: list[str] = []
    compile_one = JITFunction._do_compile

    def noted(self: Any, *arguments: Any, **more: Any) -> Any:
        compiled.append(self.__name__)
        return compile_one(self, *arguments, **more)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    for count in (1, 3, 13, 31):
        served.forward([(prompt_of(count, seed=count), 0, TABLES[0])], wanted=[1])
    served.forward([([t], 8, table) for t, table in zip((1, 2, 3), TABLES, strict=True)])

    assert compiled == []


@pytest.mark.gpu
def test_a_largest_step_without_memory_is_refused_on_a_gpu(tmp_path: Path) -> None:
    from moesaic.errors import InvalidInput

    build_reference(BASES[0], tmp_path)
    served = served_on(tmp_path, torch.float32, torch.device("cuda"))
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        torch.cuda.empty_cache()
        with pytest.raises(InvalidInput, match="--max-num-batched-tokens"):
            asyncio.run(warm_up(served.decoder, experts_elsewhere, 8192, 7, 16))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
