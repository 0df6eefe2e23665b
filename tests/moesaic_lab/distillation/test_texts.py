"""Texts to learn from: how they are read, cut and refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from moesaic.errors import InvalidInput
from moesaic.models.text.tokenizer import Tokenizer
from moesaic_lab.distillation.texts import LearningSequence, LearningText, read_texts

WORDS = ["?", "user", "assistant", "end", *"abcdefgh"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    return Tokenizer(inner, {})


def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    turns = "".join(f"{m['role']} {m['content']} end\n" for m in messages)
    return turns + ("assistant " if add_generation_prompt else "")


def read(
    tokenizer: Tokenizer, *files: Path, tokens: int = 1000, context: int = 100
) -> LearningText:
    return read_texts(files, tokenizer, render, tokens, context, seed=0)


def words_of(own: LearningSequence) -> str:
    return "".join(WORDS[token][0] for token in own.tokens)


def sequences(text: LearningText) -> list[LearningSequence]:
    return sorted([*text.train, *text.held_out], key=words_of)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def test_lines_are_documents_and_answers_are_asked_for(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "b c"}, {"role": "assistant", "content": "d"}]
    file = lines(tmp_path / "rows.jsonl", {"text": "a b c"}, {"messages": chat}, {"text": "d e"})

    told = {words_of(own): own.answer for own in sequences(read(tokenizer, file))}

    assert told == {"abc": 1, "ubceade": 5, "de": 1}


def test_long_documents_are_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e f"}]
    file = lines(tmp_path / "rows.jsonl", {"messages": chat})

    found = sequences(read(tokenizer, file, context=4))

    assert [(words_of(own), own.answer) for own in found] == [("eade", 2), ("fe", 1), ("uabc", 1)]


def test_files_are_read_by_turns_until_there_are_enough_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    many = lines(tmp_path / "many.jsonl", *({"text": "a a"} for _ in range(50)))
    few = tmp_path / "few.txt.gz"
    few.write_bytes(gzip.compress(b"b b b\nc c"))

    text = read(tokenizer, many, few, tokens=11)

    assert text.num_tokens == 11
    assert [words_of(own) for own in sequences(text)] == ["aa", "aa", "aa", "bbbcc"]


def test_one_in_ten_sequences_is_held_out_in_a_drawn_order(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"text": f"{a} {b}"} for a in "abcdefgh" for b in "abcde"]
    file = lines(tmp_path / "rows.jsonl", *rows)

    text, other = read(tokenizer, file), read_texts([file], tokenizer, render, 1000, 100, seed=1)

    assert (len(text.train), len(text.held_out)) == (36, 4)
    assert text.digest == read(tokenizer, file).digest
    assert text.digest != other.digest
    assert sequences(text) == sequences(other)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.jsonl", b'{"text": "a b"}\n{"text"', r"rows\.jsonl, line 2 is not valid JSON"),
        ("rows.jsonl", b'{"prompt": "a"}', r'line 1: expected {"text": "..."} or {"messages"'),
        ("rows.jsonl", b'{"messages": []}', "line 1: expected"),
        ("rows.jsonl", b'"a"', "line 1: expected"),
        ("rows.txt", b"a \xff", r"rows\.txt is not UTF-8"),
        ("rows.txt.gz", b"a b", r"rows\.txt\.gz cannot be read"),
        ("rows.txt", b"", "too little text"),
        ("rows.txt", b"a b c", "too little text"),
    ],
)
def test_what_cannot_be_learned_from_is_named(
    name: str, content: bytes, problem: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(InvalidInput, match=f"--data: .*{problem}"):
        read(tokenizer, tmp_path / name)


def test_a_file_that_is_not_there_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gone\.txt cannot be read: No such file"):
        read(tokenizer, tmp_path / "gone.txt")
