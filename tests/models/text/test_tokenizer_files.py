"""Files of tokenizers are read as by ``AutoTokenizer``: ids, texts and streamed texts are equal."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.errors import CheckpointError
from moesaic.models.configuration.tokenizer_files import TokenizerFiles, read_special_tokens
from moesaic.models.text.tokenizer import StreamDecoder, Tokenizer
from tests.models.text.tokenizer_cases import (
    CONFIG,
    KINDS,
    MAP,
    MORE,
    SPELLINGS,
    TEXTS,
    Files,
    token,
    write,
)

DEMO = Path(__file__).parents[3] / "models" / "demo"
CASES = list(product(KINDS, SPELLINGS))
# Every kind and every spelling, but not each with each.
SAMPLE = [case for number, case in enumerate(CASES) if number % 11 == 0]


BYTES, PIECES = ("qwen", "o200k", "deepseek", "digits"), ("mixtral", "metaspace-first")
# A family, the class in its files, if any, and the kinds of tokenizers for this class.
CLASSES: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("qwen3_moe", None, BYTES),
    ("qwen2_moe", "Qwen2TokenizerFast", BYTES),
    ("qwen3_moe", "PreTrainedTokenizerFast", BYTES + PIECES),
    ("qwen3_moe", "LlamaTokenizer", PIECES),
    ("olmoe", None, BYTES),
    ("olmoe", "GPTNeoXTokenizerFast", BYTES),
    ("olmoe", "GPT2Tokenizer", BYTES),
    ("deepseek_v3", "LlamaTokenizerFast", BYTES + PIECES),
    ("deepseek_v2", None, BYTES + PIECES),
    ("gpt_oss", "GPT2TokenizerFast", BYTES),
    ("gpt_oss", "NoSuchTokenizer", BYTES + PIECES),
    ("mixtral", "LlamaTokenizer", BYTES + PIECES),
    ("glm4_moe", "Qwen2Tokenizer", BYTES + PIECES),
    ("granitemoe", "GPT2Tokenizer", BYTES + PIECES),
    ("minimax_m2", "GPT2Tokenizer", BYTES + PIECES),
    ("ernie4_5_moe", "LlamaTokenizer", BYTES + PIECES),
]
FLAGS: list[dict[str, bool]] = [
    {},
    {"add_prefix_space": True, "legacy": True},
    {"add_prefix_space": False, "legacy": False, "add_bos_token": True},
    {"legacy": True, "add_eos_token": True},
]


def of_class(
    directory: Path, family: str, name: str | None, kind: str, files: Files, flags: dict[str, bool]
) -> Path:
    """Write a model directory whose files name a class."""
    config = {**files.get(CONFIG, {}), **flags, **({"tokenizer_class": name} if name else {})}
    return write(directory, kind, {**files, CONFIG: config}, {"model_type": family})


def check(directory: Path) -> None:
    """Compare the tokenizer of a directory with that of transformers, on every text."""
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for field in ("bos_token", "eos_token", "eos_token_id", "pad_token", "pad_token_id"):
        assert getattr(ours, field) == getattr(reference, field), field
    assert read_special_tokens(directory) == reference.special_tokens_map
    assert ours.vocab_size == len(reference)
    files = TokenizerFiles.read(directory)
    assert files.ids() == reference.get_vocab()
    for text, adds in product(TEXTS, (True, False)):
        ids = reference.encode(text, add_special_tokens=adds)
        assert ours.encode(text, add_special_tokens=adds) == ids, text
        for skips in (True, False):
            decoded = reference.decode(ids, skip_special_tokens=skips)
            assert ours.decode(ids, skip_special_tokens=skips) == decoded
            stream = StreamDecoder(ours, skip_special_tokens=skips)
            assert "".join(map(stream.feed, ([i] for i in ids))) + stream.flush() == decoded


@pytest.mark.parametrize(("kind", "spelling"), SAMPLE)
def test_a_tokenizer_equals_that_of_transformers(tmp_path: Path, kind: str, spelling: str) -> None:
    check(write(tmp_path, kind, SPELLINGS[spelling]))


def test_the_tokenizer_of_the_demo_model_is_that_of_transformers() -> None:
    check(DEMO)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_transformers_in_every_spelling(tmp_path: Path, kind: str) -> None:
    for spelling, files in SPELLINGS.items():
        check(write(tmp_path / spelling, kind, files))


@pytest.mark.parametrize(("family", "name", "kinds"), CLASSES)
def test_a_class_changes_what_it_changes_in_transformers(
    tmp_path: Path, family: str, name: str | None, kinds: tuple[str, ...]
) -> None:
    number = CLASSES.index((family, name, kinds))
    spelling = list(SPELLINGS.values())[number * 2]
    kind, flags = kinds[number % len(kinds)], FLAGS[number % len(FLAGS)]
    check(of_class(tmp_path, family, name, kind, spelling, flags))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "kinds"), CLASSES)
def test_a_class_changes_the_same_in_every_spelling(
    tmp_path: Path, family: str, name: str | None, kinds: tuple[str, ...]
) -> None:
    for number, (kind, spelling) in enumerate(product(kinds, SPELLINGS)):
        flags = FLAGS[number % len(FLAGS)]
        check(of_class(tmp_path / str(number), family, name, kind, SPELLINGS[spelling], flags))


def test_the_sample_has_every_kind_and_every_spelling() -> None:
    kinds, spellings = ({case[place] for case in SAMPLE} for place in (0, 1))

    assert (kinds, spellings) == (set(KINDS), set(SPELLINGS))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({CONFIG: {"split_special_tokens": 1}}, f"{CONFIG}: split_special_tokens: expected true"),
        ({CONFIG: {"eos_token": 5}}, f"{CONFIG}: eos_token: expected a text"),
        ({CONFIG: {"bos_token": ["<s>"]}}, f"{CONFIG}: bos_token: expected a text"),
        ({MAP: {"bos_token": {"lstrip": True}}}, f"{MAP}: bos_token: expected a text"),
        (
            {CONFIG: {"added_tokens_decoder": []}},
            f"{CONFIG}: added_tokens_decoder: expected an object",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"x": token("<tool>")}}},
            f"{CONFIG}: added_tokens_decoder: expected token ids",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"7": "<tool>"}}},
            f"{CONFIG}: added_tokens_decoder.7: expected an object with content",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"7": token("<tool>", lstrip="yes")}}},  # type: ignore[arg-type]
            f"{CONFIG}: added_tokens_decoder.7.lstrip: expected true or false",
        ),
        (
            {CONFIG: {"added_tokens_decoder": {"7": token("<tool>", trim=True)}}},
            f"{CONFIG}: added_tokens_decoder.7.trim: expected true or false for one of lstrip",
        ),
        ({CONFIG: {"extra_special_tokens": "<tool>"}}, f"{CONFIG}: extra_special_tokens: expected"),
        ({CONFIG: {"extra_special_tokens": [1]}}, f"{CONFIG}: extra_special_tokens.0.: expected"),
        ({MORE: {"<tool>": "7"}}, f"{MORE}: <tool>: expected a token id"),
    ],
)
def test_a_malformed_token_is_refused_by_its_field(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.load(write(tmp_path, "mixtral", files))
