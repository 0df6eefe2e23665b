"""``moesaic distill`` as users run it."""

import json
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.parity.cases import CASES, build_reference
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.united import find_united
from tests.cli.conftest import Run, Start

WORDS = [f"w{number}" for number in range(90)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with grouped-query attention, with latent attention, and with other experts, and a tokenizer each."""
    found = {}
    for family in ("qwen3_moe", "deepseek_v2", "gpt_oss"):
        found[family] = tmp_path_factory.mktemp(family)
        build_reference(next(case for case in CASES if case.family == family), found[family])
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=WORDS[0]))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(found[family] / "tokenizer.json"))
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"text": " ".join(WORDS[(7 * i + i * j) % 90] for j in range(12))} for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(model: Path, rows: Path, **more: object) -> list[str]:
    given = {"model": model, "data": rows, "steps": 3, "threads": 1, **more}
    return ["distill", *(w for name, value in given.items() for w in (f"--{name}", str(value)))]


def test_files_are_written_and_reported(
    ask: Run, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "here"

    result = ask(*arguments(models["qwen3_moe"], data, ways="4,2", out=out, **{"joint-steps": 2}))

    assert result.returncode == 0, result.stderr
    config = load_config(models["qwen3_moe"])
    assert list(find_united(out, config)) == [2, 4]
    assert [path.name for path in out.iterdir() if path.is_dir()] == []
    assert "way 2: mean, trained" in result.stdout
    assert "united-way-4.safetensors: learned from" in result.stdout
    assert "the same likeliest token" in result.stdout
    assert "united experts: 18 of 18" in result.stderr  # lines, where there is no terminal
    assert "way 4, whole model: 2 of 2" in result.stderr


def test_programs_get_every_error(
    ask: Run, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    result = ask(*arguments(models["deepseek_v2"], data, ways="8", out=tmp_path), "--json")

    [way] = json.loads(result.stdout)["ways"]
    assert way["way"] == 8
    assert list(way["errors"]) == list(way["mean_errors"]) == ["1", "2"]  # the first layer is dense


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"ways": "2,two"}, "--ways: expected numbers like 2,4,8, got 'two'"),
        ({"ways": "1"}, "--ways: a layer has 8 experts: give 2 to 8, got 1"),
        ({"ways": "9"}, "--ways: a layer has 8 experts: give 2 to 8, got 9"),
        ({"tokens": 60}, "--tokens: 60 tokens are too few for 8 experts"),
        ({"data": "gone.txt"}, "--data: gone.txt cannot be read: No such file or directory"),
        ({"start": "gone"}, "--start: give --joint-steps as well"),
        ({"start": "gone", "joint-steps": 1}, "--start: gone is not a directory"),
        ({"out": "/proc/nowhere"}, "--out /proc/nowhere: No such file or directory"),
    ],
)
def test_wrong_use_names_the_field_and_the_fix(
    more: dict[str, object], problem: str, ask: Run, models: dict[str, Path], data: Path
) -> None:
    result = ask(*arguments(models["qwen3_moe"], data, **more))

    assert result.returncode == 2
    assert problem in result.stderr
    assert not list(models["qwen3_moe"].glob("united*"))


def test_experts_with_biases_are_refused_by_name(
    ask: Run, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    result = ask(*arguments(models["gpt_oss"], data, ways="2", out=tmp_path))

    assert result.returncode == 2
    assert "--model: experts of family gpt_oss have biases" in result.stderr
    assert not list(tmp_path.glob("united*"))


def test_what_was_distilled_goes_on_learning_elsewhere(
    ask: Run, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    ask(*arguments(models["qwen3_moe"], data, ways=4, out=first))
    more = {"start": first, "joint-steps": 2, "joint-tokens": 50, "joint-threshold": 0.2}

    same = ask(*arguments(models["qwen3_moe"], data, ways=4, out=first, **more))
    other = ask(*arguments(models["qwen3_moe"], data, ways=4, out=second, **more))

    assert same.returncode == 2
    assert f"--start: give another --out: results would replace {first}" in same.stderr
    assert other.returncode == 0, other.stderr
    assert "united experts:" not in other.stderr
    recipe = find_united(second, load_config(models["qwen3_moe"]))[4].manifest.recipe
    assert recipe["joint_tokens"] == 50
    assert recipe["joint_threshold"] == 0.2


def test_latent_attention_learns_layer_by_layer_alone(
    ask: Run, models: dict[str, Path], data: Path
) -> None:
    result = ask(*arguments(models["deepseek_v2"], data, **{"joint-steps": 1}))

    assert result.returncode == 2
    assert "--joint-steps: a model of family deepseek_v2 cannot be trained" in result.stderr


def test_no_model_is_an_error(ask: Run, data: Path, tmp_path: Path) -> None:
    result = ask(*arguments(tmp_path / "nowhere", data))

    assert result.returncode == 1
    assert "nowhere: is not a directory" in result.stderr


def test_no_data_is_wrong_use(ask: Run, models: dict[str, Path]) -> None:
    result = ask("distill", "--model", str(models["qwen3_moe"]))

    assert result.returncode == 2
    assert "--data" in result.stderr


@pytest.mark.slow
def test_ctrl_c_ends_it_and_the_same_command_goes_on(
    ask: Run, start: Start, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    long = arguments(models["qwen3_moe"], data, out=out, ways="2,4", **{"joint-steps": 30_000})
    process = start(*long)
    assert process.stderr is not None
    for line in process.stderr:
        if "whole model: 1 of" in line:
            break

    process.send_signal(signal.SIGINT)

    assert process.wait() == 130
    assert process.stderr.read().endswith("interrupted; repeat the command to continue\n")
    short = arguments(models["qwen3_moe"], data, out=out, ways="2,4", **{"joint-steps": 1})
    again = ask(*short)
    assert "united experts:" not in again.stderr  # all layers were done
    assert sorted(path.name for path in out.iterdir()) == [
        "united-way-2.safetensors",
        "united-way-4.safetensors",
    ]
