"""Models computed by the kernels against models computed by torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.parity.cases import CASES, ParityCase, Served, build_reference, prompt_of
from benchmarks.parity.published import publish
from moesaic.dispatch.local import LocalDispatcher
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pace import LoadPace
from moesaic.kernels.gated_mlp import CodedMLP
from moesaic.models.configuration.sizes import Numbers, weight_bytes
from moesaic.models.layers import decoder
from moesaic.models.layers.decode_graphs import DecodeGraphs, at_once
from moesaic.models.layers.static_decode import DecodeShapes, StaticDecode, StepTensors
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint
from tests.kernels.ways_of_a_gpu import take_the_ways_of_a_gpu
from tests.models.weights.formats.conftest import OPTIONS, form_of

pytestmark = pytest.mark.suite  # whole models in the interpreter: a minute of one core

BASES = [case for case in CASES if case.name == "base"]


def served_on(directory: Path, dtype: torch.dtype, device: torch.device) -> Served:
    """The model with all of it on ``device``."""
    served = Served(directory)
    checkpoint = Checkpoint(directory)
    served.decoder = decoder.Decoder.load(checkpoint, served.config, dtype, device)
    served.cache = served.decoder.new_kv_cache(served.cache.num_blocks, served.cache.block_size)
    dispatcher = LocalDispatcher(checkpoint, served.config, dtype, device)

    async def moe(layer: int, hidden_states: Tensor) -> Tensor:
        step = dispatcher.begin_step()
        return await dispatcher.dispatch(step, layer, hidden_states)

    served.moe = moe
    return served


def steps(served: Served) -> Tensor:
    """Prompts, then a chunk beside decoded tokens, then decoded tokens alone; the logits of most."""
    a, b = prompt_of(25, seed=1), prompt_of(12, seed=2)
    tables = [9, 8, 7, 6], [2, 0, 1]
    return torch.cat(
        [
            served.forward([(a[:9], 0, tables[0]), (b[:10], 0, tables[1])], wanted=[0, 7]),
            served.forward([(b[10:11], 10, tables[1]), (a[9:24], 9, tables[0])]),
            served.forward([(a[24:], 24, tables[0]), (b[11:], 11, tables[1])]),
        ]
    ).cpu()


@pytest.mark.parametrize("case", BASES, ids=str)
def test_a_family_without_compiled_kernels_equals_one_with_them(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_reference(case, tmp_path)
    expected = steps(Served(tmp_path))
    monkeypatch.setattr("moesaic.native.library.library", lambda: None)

    torch.testing.assert_close(steps(Served(tmp_path)), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_a_family_computed_by_kernels_equals_torch(
    case: ParityCase, gpu: torch.device, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    expected = steps(Served(tmp_path))

    got = steps(served_on(tmp_path, torch.float32, gpu))

    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("family", "form"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "awq")])
def test_a_published_model_is_computed_from_its_codes(
    family: str, form: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"hidden_size": 64, **OPTIONS[family], "num_experts_per_tok": 2}
    case = ParityCase(family, "for codes", options)
    build_reference(case, tmp_path / "float", save_original_format=True)
    publish(tmp_path / "float", tmp_path / "codes", tmp_path / "values", form_of(form))
    prompt = [(prompt_of(2, seed=1), 0, [0])]
    expected = Served(tmp_path / "values").forward(prompt)
    if device.type == "cpu":
        take_the_ways_of_a_gpu(monkeypatch)

    served = served_on(tmp_path / "codes", torch.float32, device)

    torch.testing.assert_close(served.forward(prompt).cpu(), expected, atol=2e-4, rtol=0)
    checkpoint, config = Checkpoint(tmp_path / "codes"), served.config
    expert = ExpertFiles(checkpoint, config, torch.float32, device).bring(LoadPace())(1, 0)
    assert isinstance(expert.mlp, CodedMLP)
    sizes = weight_bytes(config, Numbers("float32", on_cpu=False, codes=expert.mlp.form))
    besides = sum(of["bias"].nbytes for of in expert.mlp.parts if "bias" in of)
    assert expert.mlp.nbytes - besides == sizes.expert


@pytest.mark.gpu
@pytest.mark.parametrize("case", BASES, ids=str)
def test_bfloat16_on_a_gpu_stays_close_to_float32(case: ParityCase, tmp_path: Path) -> None:
    build_reference(case, tmp_path)

    got = steps(served_on(tmp_path, torch.bfloat16, torch.device("cuda")))

    # Eight bits of mantissa, and now and then another expert: most rows agree closely.
    assert torch.cosine_similarity(got, steps(Served(tmp_path)), dim=-1).median() > 0.99


def decode_batch(rows: list[tuple[int, int, list[int]]]) -> StepBatch:
    """One (token, position, block table) each."""
    return StepBatch(
        token_ids=[token for token, _, _ in rows],
        positions=[position for _, position, _ in rows],
        sequence_rows=[1] * len(rows),
        block_tables=[table for _, _, table in rows],
        wanted=[1] * len(rows),
    )


@pytest.mark.parametrize("case", BASES[::3], ids=str)
def test_a_step_of_fixed_shape_equals_a_free_one(
    case: ParityCase, gpu: torch.device, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    served = served_on(tmp_path, torch.float32, gpu)
    a, b = prompt_of(25, seed=1), prompt_of(12, seed=2)
    tables = [9, 8, 7, 6, 5], [2, 0]
    served.forward([(a[:24], 0, tables[0]), (b[:11], 0, tables[1])])
    tensors = StepTensors(served.decoder, served.cache, DecodeShapes(3, 32))
    static = StaticDecode(served.decoder, served.cache, tensors, num_rows=4)
    at_once(static.compute(served.moe))  # before there are rows it writes nothing

    batch = decode_batch([(b[11], 11, tables[1]), (a[24], 24, tables[0])])
    tensors.fill(decode_batch([(1, 24, tables[0])] * 3), 4)  # of which nothing may be left
    tensors.fill(batch, 4)
    at_once(static.compute(served.moe))
    got = tensors.logits.cpu()

    kept = [served.cache.rows(layer).clone() for layer in range(served.config.num_layers)]
    expected = served.forward([(b[11:], 11, tables[1]), (a[24:], 24, tables[0])]).cpu()
    torch.testing.assert_close(got[:2], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(got[2:], expected[:1].expand(2, -1), atol=1e-5, rtol=0)
    for layer, rows in enumerate(kept):
        torch.testing.assert_close(rows, served.cache.rows(layer), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", BASES, ids=str)
def test_captured_steps_equal_free_ones(
    case: ParityCase, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    device = torch.device("cuda")
    served, captured = (served_on(tmp_path, dtype, device) for _ in range(2))
    graphs = DecodeGraphs(captured.decoder, captured.cache, captured.moe, max_rows=3, max_length=64)
    prompts = [prompt_of(length, seed=length) for length in (9, 25, 1)]
    tables = [[9, 8, 7, 6, 5], [2, 0, 1, 3, 4], [10, 11, 12, 13, 14]]
    for prompt, table in zip(prompts, tables, strict=True):
        served.forward([(prompt, 0, table)])
        captured.forward([(prompt, 0, table)])

    for step in range(12):
        count = 1 + step % 3
        tokens = prompt_of(count, seed=step)
        rows = [
            (token, len(prompt), table)
            for token, prompt, table in zip(tokens, prompts, tables, strict=False)
        ]
        batch = decode_batch(rows)
        assert graphs.takes(batch)
        got = graphs.forward(batch)
        expected = served.forward([([token], at, table) for token, at, table in rows])
        # In bfloat16 a padded batch may take other tiles, and round elsewhere.
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
        for prompt, token in zip(prompts, tokens, strict=False):
            prompt.append(token)
