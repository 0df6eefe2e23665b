"""The files of a tokenizer mean what they mean to ``AutoTokenizer``: ids, texts, and texts that stream."""

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
    token,
    write,
)

CASES = list(product(KINDS, SPELLINGS))
# Every kind and every spelling, but not each with each.
SAMPLE = [case for number, case in enumerate(CASES) if number % 11 == 0]


def check(directory: Path) -> None:
    """Compare the tokenizer of a directory with that of transformers, on every text."""
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for name in ("bos_token", "eos_token", "pad_token"):
        for field in (name, f"{name}_id"):
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
def test_a_tokenizer_is_that_of_transformers(tmp_path: Path, kind: str, spelling: str) -> None:
    check(write(tmp_path, kind, SPELLINGS[spelling]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_transformers_in_every_spelling(tmp_path: Path, kind: str) -> None:
    for spelling, files in SPELLINGS.items():
        check(write(tmp_path / spelling, kind, files))


def test_the_sample_has_every_kind_and_every_spelling() -> None:
    kinds, spellings = ({case[place] for case in SAMPLE} for place in (0, 1))

    assert (kinds, spellings) == (set(KINDS), set(SPELLINGS))


@pytest.mark.parametrize(
    ("files", "says"),
    [
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
def test_a_token_of_a_wrong_form_is_refused_by_its_place(
    tmp_path: Path, files: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.load(write(tmp_path, "mixtral", files))
