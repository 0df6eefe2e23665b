"""Reading weights: what is damaged is named, and what is not asked for is not kept."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import (
    CASES,
    CPU,
    ParityCase,
    Served,
    build_reference,
    prompt_of,
    reference_logits,
)
from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


def shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / INDEX).read_text())
    return directory / str(index["weight_map"][name])


def test_every_tensor_reads_as_safetensors_reads_it(model_directory: Path) -> None:
    checkpoint = Checkpoint(model_directory)

    for shard in model_directory.glob("*.safetensors"):
        for name, expected in load_file(shard).items():
            assert torch.equal(
                checkpoint.read(name, tuple(expected.shape), torch.float32, CPU), expected
            )


def test_reading_converts_to_the_asked_dtype(tmp_path: Path) -> None:
    stored = torch.randn(3, 5).to(torch.bfloat16)
    save_file({"a": stored, "b": stored.half()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)

    assert torch.equal(checkpoint.read("a", (3, 5), torch.float32, CPU), stored.float())
    assert torch.equal(checkpoint.read("b", (3, 5), torch.bfloat16, CPU), stored)
    entry = torch.empty(5, dtype=torch.bfloat16)
    checkpoint.read_slice_into("a", 2, 3, entry)
    assert torch.equal(entry, stored[2])


def test_a_missing_tensor_is_named(model_directory: Path) -> None:
    checkpoint = Checkpoint(model_directory)

    with pytest.raises(CheckpointError, match="is missing") as caught:
        checkpoint.read("model.layers.9.nothing", (1,), torch.float32, CPU)

    assert caught.value.tensor == "model.layers.9.nothing"


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(model_directory: Path) -> None:
    checkpoint = Checkpoint(model_directory)

    with pytest.raises(CheckpointError, match=r"expected shape \[47\], found \[48\]") as caught:
        checkpoint.read(NORM, (47,), torch.float32, CPU)

    assert (caught.value.file, caught.value.tensor) == (shard_of(model_directory, NORM).name, NORM)


def test_a_decoder_of_another_size_names_the_first_tensor_that_does_not_fit(
    model_directory: Path,
) -> None:
    path = model_directory / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 96', '"vocab_size": 97'))

    with pytest.raises(
        CheckpointError, match=r"embed_tokens.*expected shape \[97, 48\], found \[96, 48\]"
    ):
        Decoder.load(Checkpoint(model_directory), load_config(model_directory), torch.float32, CPU)


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match="expected one of F32, F16, BF16, found I8"):
        Checkpoint(tmp_path).read("a", (4,), torch.float32, CPU)


def test_a_truncated_shard_is_found_before_anything_is_read(model_directory: Path) -> None:
    shard = shard_of(model_directory, NORM)
    shard.write_bytes(shard.read_bytes()[:-4])

    with pytest.raises(CheckpointError, match="is truncated") as caught:
        Checkpoint(model_directory)

    assert caught.value.file == shard.name
    assert caught.value.tensor is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        b"\xff" * 8 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x02" + b"\0" * 7 + b"{x",
        b"\x10" + b"\0" * 7 + b'{"a": {"b": 1}} ',
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)

    assert caught.value.file == "model.safetensors"


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(8)
    )

    with pytest.raises(CheckpointError, match=r"F32 \[2, 2\] takes 16 bytes, its place has 8"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor(model_directory: Path) -> None:
    shard = shard_of(model_directory, NORM)
    shard.unlink()

    with pytest.raises(CheckpointError, match="is named by") as caught:
        Checkpoint(model_directory)

    assert caught.value.file == shard.name
    assert caught.value.tensor is not None


def test_a_tensor_that_is_not_in_its_shard_is_named(model_directory: Path) -> None:
    index = json.loads((model_directory / INDEX).read_text())
    index["weight_map"]["model.extra"] = index["weight_map"][NORM]
    (model_directory / INDEX).write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match="for this tensor, but does not contain it") as caught:
        Checkpoint(model_directory)

    assert caught.value.tensor == "model.extra"


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_an_invalid_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)

    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)

    assert caught.value.file == INDEX


def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')

    with pytest.raises(CheckpointError, match="expected a file name"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_never_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")

    with pytest.raises(CheckpointError, match="convert them to safetensors") as caught:
        Checkpoint(tmp_path)

    assert caught.value.file == name


def test_an_empty_directory_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "base"], ids=str)
def test_fused_experts_are_served_like_single_ones(tmp_path: Path, case: ParityCase) -> None:
    reference = build_reference(case, tmp_path, save_original_format=False)
    assert any(
        name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors")
    )

    prompt = prompt_of(20, seed=0)

    logits = Served(tmp_path).forward([(prompt, 0, [0, 1, 2])])
    torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=1e-4, rtol=0)


def test_loading_an_expert_returns_copies_in_the_asked_dtype(model_directory: Path) -> None:
    checkpoint, config = Checkpoint(model_directory), load_config(model_directory)

    weights = load_expert(checkpoint, config, 1, 3, torch.bfloat16, CPU)

    assert weights.gate_up.shape == (2 * config.moe.expert_size, config.hidden_size)
    assert weights.down.shape == (config.hidden_size, config.moe.expert_size)
    up = checkpoint.read(
        "model.layers.1.mlp.experts.3.up_proj.weight", (24, 48), torch.bfloat16, CPU
    )
    assert torch.equal(weights.gate_up[24:], up)


@pytest.mark.parametrize("fused", [False, True])
def test_memory_grows_with_the_experts_loaded_and_not_with_the_file(
    tmp_path: Path, fused: bool
) -> None:
    case = ParityCase(
        "qwen3_moe",
        "wide",
        {
            "num_hidden_layers": 1,
            "hidden_size": 512,
            "moe_intermediate_size": 340,
            "num_experts": 32,
        },
    )
    build_reference(case, tmp_path, save_original_format=not fused)
    expert_mib = 3 * 512 * 340 * 4 / 2**20
    script = textwrap.dedent("""
        import resource, sys, pathlib, torch
        from moesaic.models.weights.checkpoint import Checkpoint
        from moesaic.models.configuration.config import load_config
        from moesaic.models.weights.experts import load_expert

        def resident_mib():
            pages = int(open("/proc/self/statm").read().split()[1])
            return pages * resource.getpagesize() / 2**20

        directory = pathlib.Path(sys.argv[1])
        config, checkpoint = load_config(directory), Checkpoint(directory)
        load = lambda expert: load_expert(checkpoint, config, 0, expert, torch.float32, torch.device("cpu"))
        load(0)  # what the first read initialises is not the experts'
        before, kept, growth = resident_mib(), [], []
        for expert in range(1, 17):
            kept.append(load(expert))
            growth.append(resident_mib() - before)
        print(growth[3], growth[15])
    """)

    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], check=True, capture_output=True, text=True
    )

    four, sixteen = (float(mib) for mib in done.stdout.split())
    assert four < 4 * expert_mib * 1.5 + 4  # of a file that holds 32 experts
    assert 16 * expert_mib * 0.9 < sixteen < 16 * expert_mib * 1.5 + 4
