"""An answer ends at the end tokens of all files."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from moesaic.errors import CheckpointError
from moesaic.models.configuration.config import load_config
from moesaic.models.text.tokenizer import Tokenizer
from tests.models.configuration.test_config import QWEN3
from tests.models.text.tokenizer_cases import CONFIG, MAP, TOOLS, token, write

# Ids in the tokenizers of the cases.
S, END, USER = 2, 4, 3


def config(**changes: Any) -> dict[str, Any]:
    return {**QWEN3, "vocab_size": 1000, "eos_token_id": ..., **changes}


def ends_of(directory: Path, model: dict[str, Any], files: dict[str, Any]) -> tuple[int, ...]:
    fields = {name: value for name, value in model.items() if value is not ...}
    return load_config(write(directory, "mixtral", files, fields)).eos_token_ids


@pytest.mark.parametrize(
    ("said", "generation", "files", "ends"),
    [
        (0, ..., {CONFIG: {"eos_token": "<|end|>"}}, {0, END}),
        ([0, 1], ..., {CONFIG: {"eos_token": "<|end|>"}}, {0, 1, END}),
        (0, 7, {}, {0, 7}),
        (0, [7, 9], {}, {0, 7, 9}),
        (None, [7, 9], {CONFIG: {"eos_token": None}}, {7, 9}),
        (..., ..., {CONFIG: {"eos_token": token("<|end|>")}}, {END}),
        (..., ..., {MAP: {"eos_token": "<|end|>"}}, {END}),
        (..., ..., {MAP: {"eos_token": token("<|end|>")}}, {END}),
        (..., None, {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": "<|user|>"}}, {USER}),
        (S, S, {CONFIG: {"eos_token": "</s>"}}, {S}),
        (S, ..., {CONFIG: {"eos_token": "</tool>", "added_tokens_decoder": TOOLS}}, {S, 442}),
        (..., ..., {CONFIG: {"eos_token": "<|eot|>"}}, {441}),
        (..., ..., {}, set()),
        (..., ..., {CONFIG: {"eos_token": ""}}, set()),
    ],
)
def test_the_end_tokens_of_all_files_are_united(
    tmp_path: Path, said: Any, generation: Any, files: dict[str, Any], ends: set[int]
) -> None:
    if generation is not ...:
        files = {**files, "generation_config.json": {"eos_token_id": generation}}

    found = ends_of(tmp_path, config(eos_token_id=said), files)

    assert set(found) == ends
    assert len(found) == len(ends)


def test_a_directory_without_a_tokenizer_has_those_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "eos_token_id": 5}))
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token": "<|end|>"}))

    assert load_config(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", CONFIG])
def test_an_end_token_beyond_the_vocabulary_is_named_and_left_out(
    tmp_path: Path, file: str
) -> None:
    model = config(eos_token_id=[400, 7] if file == "config.json" else 7, vocab_size=300)
    files: dict[str, Any] = {
        "generation_config.json": {"eos_token_id": 400},
        CONFIG: {"eos_token": "<|eot|>"},
    }

    with capture_logs() as logs:
        ends = ends_of(tmp_path, model, {name: files[name] for name in files if name == file})

    assert ends == (7,)
    assert [entry["event"] for entry in logs] == ["end_token.beyond_vocabulary"]
    assert (logs[0]["file"], logs[0]["vocab_size"]) == (file, 300)


def test_the_default_of_a_family_is_used_if_no_file_names_an_end_token(tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "vocab_size": 1000}

    assert ends_of(tmp_path / "a", mixtral, {}) == (2,)
    assert ends_of(tmp_path / "b", mixtral, {CONFIG: {"eos_token": "<|end|>"}}) == (END,)
    assert ends_of(tmp_path / "c", {**mixtral, "vocab_size": 2}, {}) == ()


@pytest.mark.parametrize(
    "damaged",
    [
        {"model": 5, "added_tokens": 5},
        {"model": {"vocab": 5}, "added_tokens": [5, {"id": "x"}]},
        {"model": {"vocab": [5, [], ["a"]]}},
        {"model": {"vocab": {"<|end|>": "4"}}, "added_tokens": None},
    ],
)
def test_a_damaged_tokenizer_is_reported_by_its_reader(tmp_path: Path, damaged: Any) -> None:
    write(tmp_path, "mixtral", {CONFIG: {"eos_token": "</s>"}}, {**QWEN3, "eos_token_id": 7})
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))

    assert 7 in load_config(tmp_path).eos_token_ids
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is not a valid tokenizer"):
        Tokenizer.load(tmp_path)


def test_the_default_end_token_of_a_class_is_not_used(tmp_path: Path) -> None:
    qwen = {name: value for name, value in config().items() if value is not ...}

    directory = write(tmp_path, "qwen", {CONFIG: {"tokenizer_class": "Qwen2Tokenizer"}}, qwen)

    assert Tokenizer.load(directory).eos_token == "<|endoftext|>"
    assert load_config(directory).eos_token_ids == ()


@pytest.mark.parametrize("value", ["</s>", -1, 2.0, True, [1, "a"], {"id": 1}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_invalid_token_id_is_refused_by_name(tmp_path: Path, file: str, value: Any) -> None:
    said = value if file == "config.json" else 3
    files = {} if file == "config.json" else {file: {"eos_token_id": value}}

    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id: expected an integer"):
        ends_of(tmp_path, config(eos_token_id=said), files)


def test_a_gateway_recognises_workers_with_other_end_tokens(tmp_path: Path) -> None:
    named: list[tuple[int, str | None]] = [(S, None), (S, "</s>"), (S, "<|end|>"), (S, "<|user|>")]
    model, alike, *others = [
        load_config(
            write(
                tmp_path / str(number),
                "mixtral",
                {CONFIG: {"eos_token": text}},
                config(eos_token_id=said),
            )
        )
        for number, (said, text) in enumerate(named)
    ]

    assert len({each.config_digest for each in (model, alike, *others)}) == 1
    # The digest is unchanged if the configuration names all end tokens.
    assert model.answering_digest == alike.answering_digest == model.config_digest
    assert len({each.answering_digest for each in (model, *others)}) == 3
