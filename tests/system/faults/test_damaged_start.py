"""A suite with damaged files ends at once, with the name of what is damaged, and leaves nothing behind."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.suites import DEMO, MOESAIC
from tests.waiting import HANG_S

EXPERT = "model.layers.2.mlp.experts.5.down_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"  # every attention worker has it
INFINITE = b"\x80\x7f"  # as bfloat16, little-endian


def damaged(directory: Path, tensor: str) -> Path:
    """The demo model with one weight that is infinite."""
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, directory)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    place = start + json.loads(content[8:start])[tensor]["data_offsets"][0]
    content[place : place + 2] = INFINITE
    path.write_bytes(content)
    return directory


def ended(directory: Path, model: Path, *flags: str) -> str:
    """What a suite that ends at once says, without a trace of Python."""
    up = subprocess.run(
        [str(MOESAIC), "up", "--model", str(model), "--port", "0", *flags],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert up.returncode == 2, up.stderr
    assert "starts again" not in up.stderr
    assert "Traceback" not in up.stderr
    return up.stderr


@pytest.mark.parametrize(
    ("tensor", "flags"),
    [
        (EXPERT, ("--topology", "disaggregated")),
        (EXPERT, ("--topology", "disaggregated", "--detach")),
        (NORM, ("--topology", "disaggregated")),
        (EXPERT, ("--topology", "local")),
        (EXPERT, ("--topology", "local", "--offload")),
        (EXPERT, ("--topology", "gathered", "--attention", "2")),
        (EXPERT, ("--topology", "edge")),
        (EXPERT, ("--topology", "edge", "--detach")),
        (NORM, ("--topology", "local", "--tensor-parallel", "2")),
        (EXPERT, ("--topology", "local", "--tensor-parallel", "2")),
    ],
)
def test_damaged_weights_end_the_start_at_once(
    tmp_path: Path, tensor: str, flags: tuple[str, ...]
) -> None:
    model = damaged(tmp_path / "damaged", tensor)

    told = ended(tmp_path, model, *flags)

    assert f"model.safetensors: tensor {tensor}: 1 of " in told
    assert "no restart can help" in told
    assert not (tmp_path / "run" / "moesaic.json").exists()
    started = re.findall(r"started \(pid (\d+)\)", told)
    assert not any(Path("/proc", pid).exists() for pid in started)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: is not valid JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json: is not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: is not UTF-8"),
        ("config.json", b"{" + b'"a":{' * 5000, "config.json: is nested too deep"),
        ("generation_config.json", b'{"top_p": 7}', "generation_config.json: top_p"),
    ],
)
def test_other_damaged_files_end_it_too(
    tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    model = damaged(tmp_path / "damaged", NORM)
    (model / file).write_bytes(content)

    assert says in ended(tmp_path, model)
