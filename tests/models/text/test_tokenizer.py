"""Tokens and text, above all: text that streams is the text that decodes at once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.errors import CheckpointError
from moesaic.models.text.tokenizer import StreamDecoder, Tokenizer


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    inner: tokenizers.Tokenizer = request.getfixturevalue(f"{request.param}_tokenizer")
    return Tokenizer(inner, {})


def stream(
    tokenizer: Tokenizer, token_ids: list[int], size: int, skip_special_tokens: bool
) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [decoder.feed(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [*pieces, decoder.flush()]


# the fixture's tokenizer holds no state between examples
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=250)


@relaxed
@given(st.text(max_size=60), st.integers(1, 4), st.booleans())
def test_streamed_text_equals_decoded_text(
    tokenizer: Tokenizer, text: str, size: int, skip: bool
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    pieces = stream(tokenizer, token_ids, size, skip)

    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@relaxed
@given(st.lists(st.integers(0, 345), max_size=40), st.integers(1, 4), st.booleans())
def test_random_token_ids_stream_as_they_decode(
    tokenizer: Tokenizer, token_ids: list[int], size: int, skip: bool
) -> None:
    pieces = stream(tokenizer, token_ids, size, skip)

    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@relaxed
@given(st.lists(st.integers(0, 295), max_size=12), st.booleans())
def test_spaces_bytes_and_special_tokens_stream_as_they_decode(
    tokenizer: Tokenizer, choices: list[int], skip: bool
) -> None:
    awkward = [0, 1, 2, 259, 260, 291, 292, 293, 3 + 0xE6, 3 + 0xBC, 3 + 0xA2, 3 + 0x20]
    token_ids = [awkward[choice % len(awkward)] for choice in choices]

    assert "".join(stream(tokenizer, token_ids, 1, skip)) == tokenizer.decode(token_ids, skip)


def test_plain_text_is_given_out_token_by_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("the quick fox", add_special_tokens=False)

    pieces = stream(tokenizer, token_ids, 1, True)

    assert sum(bool(piece) for piece in pieces) >= len(token_ids) - 1  # a first space has no text
    assert pieces[-1] == ""


def test_a_split_character_waits_for_its_last_byte(
    byte_level_tokenizer: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer, {})
    token_ids = tokenizer.encode("\U00012345", add_special_tokens=False)  # not in the training text
    assert len(token_ids) == 4
    decoder = StreamDecoder(tokenizer)

    assert [decoder.feed([token_id]) for token_id in token_ids] == ["", "", "", "\U00012345"]


def test_an_answer_cut_within_a_character_shows_a_replacement(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a\U00012345", add_special_tokens=False)[:-1]
    decoder = StreamDecoder(tokenizer)

    assert decoder.feed(token_ids) + decoder.flush() == tokenizer.decode(token_ids)


def test_a_directory_loads_with_its_special_tokens(
    tmp_path: Path, byte_level_tokenizer: tokenizers.Tokenizer
) -> None:
    byte_level_tokenizer.enable_truncation(4)
    byte_level_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "bos_token": None,
        "pad_token": "<|user|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    tokenizer = Tokenizer.load(tmp_path)

    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 0)
    assert tokenizer.bos_token is None
    assert tokenizer.pad_token_id == tokenizer.token_to_id("<|user|>") == 1
    assert tokenizer.id_to_token(1) == "<|user|>"
    assert tokenizer.id_to_token(10**6) is None
    text = "The quick brown fox<|end|>"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > 4
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert tokenizer.decode(token_ids) == "The quick brown fox"
    assert max(token_ids) < tokenizer.vocab_size == 340


@pytest.mark.parametrize(
    ("break_it", "file"),
    [
        (lambda d: None, "tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer.json"),
    ],
)
def test_a_directory_without_a_valid_tokenizer_is_refused(
    tmp_path: Path, break_it: Callable[[Path], object], file: str
) -> None:
    break_it(tmp_path)

    with pytest.raises(CheckpointError, match=file):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_that_has_a_token_twice_is_refused(
    tmp_path: Path, byte_level_tokenizer: tokenizers.Tokenizer
) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer.save(str(path))
    path.write_text(path.read_text().replace('"vocab": {', '"vocab": {"the": 7, "the": 8, ', 1))

    with pytest.raises(CheckpointError, match=r"tokenizer.json: has the key model.vocab.the twice"):
        Tokenizer.load(tmp_path)
