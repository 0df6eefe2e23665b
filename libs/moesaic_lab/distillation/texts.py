"""Texts to learn from: files of plain text or JSON lines, as token sequences."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InvalidInput
from moesaic.models.text.tokenizer import Tokenizer

CONTEXT = 512  # tokens of a sequence, at most
HELD_OUT_SHARE = 0.1  # of the sequences, one at least
_PIECE_BYTES = 1 << 14  # of plain text that are encoded at once, about

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Writes messages as one text; with the words that open an answer, if the other argument says so."""


@dataclass(frozen=True)
class LearningSequence:
    """Some tokens in a row.

    Attributes:
        tokens: ids.
        answer: index of the first that the model would be asked for: 1, or the beginning of an answer.
    """

    tokens: list[int]
    answer: int = 1

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class LearningText:
    """Sequences in a drawn order.

    Attributes:
        train: to learn from.
        held_out: to measure by.
    """

    train: Sequence[LearningSequence]
    held_out: Sequence[LearningSequence]

    @property
    def num_tokens(self) -> int:
        """Number of all tokens."""
        return sum(map(len, [*self.train, *self.held_out]))

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all tokens in their order."""
        digest = sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{[(len(own), own.answer) for own in part]}".encode())
            for own in part:
                digest.update(np.array(own.tokens, dtype=np.int64).tobytes())
        return digest.hexdigest()


def read_texts(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    render: Render,
    num_tokens: int,
    context: int,
    seed: int,
) -> LearningText:
    """Read about the first ``num_tokens`` tokens, as many documents of each file.

    Args:
        files: UTF-8. The lines of ``*.jsonl`` hold ``text`` or ``messages`` each; every other file is one text.
            ``.gz`` is decompressed.
        tokenizer: of the model.
        render: writes ``messages`` as one text.
        num_tokens: of all files.
        context: tokens of a sequence, at most; longer documents are cut.
        seed: of the order of the sequences.

    Raises:
        InvalidInput: a file cannot be read, or the files hold too little.
    """
    sequences: list[LearningSequence] = []
    wanted, readers = num_tokens, [_documents(file, tokenizer, render) for file in files]
    while readers and wanted > 0:
        for reader in list(readers):
            document = next(reader, None)
            if document is None:
                readers.remove(reader)
                continue
            sequences += _cut(document, min(context, max(wanted, 0)), wanted)
            wanted -= len(document)
    if len(sequences) < 2:
        raise InvalidInput("--data", "holds too little text: give at least two documents")
    random.Random(seed).shuffle(sequences)
    num_held = max(1, round(len(sequences) * HELD_OUT_SHARE))
    return LearningText(sequences[:-num_held], sequences[-num_held:])


def _cut(document: LearningSequence, context: int, most: int) -> Iterator[LearningSequence]:
    """Cut the first ``most`` tokens into sequences of at most ``context`` of them."""
    tokens = document.tokens[: max(0, most)]
    for start in range(0, len(tokens), context):
        own = tokens[start : start + context]
        answer = document.answer - start
        if len(own) > 1:
            yield LearningSequence(own, answer if 1 <= answer < len(own) else 1)


def _documents(file: Path, tokenizer: Tokenizer, render: Render) -> Iterator[LearningSequence]:
    lines = file.name.removesuffix(".gz").endswith(".jsonl")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            if lines:
                for number, line in enumerate(opened, start=1):
                    if line.strip():
                        yield _document(f"{file}, line {number}", line, tokenizer, render)
                return
            while piece := opened.readlines(_PIECE_BYTES):
                yield LearningSequence(tokenizer.encode(b"".join(piece).decode()))
    except (OSError, EOFError, zlib.error) as error:
        cause = getattr(error, "strerror", None) or error
        raise InvalidInput("--data", f"{file} cannot be read: {cause}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput("--data", f"{file} is not UTF-8: {error.reason}") from error


def _document(place: str, line: bytes, tokenizer: Tokenizer, render: Render) -> LearningSequence:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInput("--data", f"{place} is not valid JSON: {error}") from error
    text = row.get("text") if isinstance(row, dict) else None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(text, str):
        return LearningSequence(tokenizer.encode(text))
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        expected = 'expected {"text": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'
        raise InvalidInput("--data", f"{place}: {expected}")
    # Templates write the tokens that open a text themselves. What they write behind the last turn, nobody asks for.
    whole = tokenizer.encode(render(messages, False).rstrip(), add_special_tokens=False)
    asked = tokenizer.encode(render(messages[:-1], True), add_special_tokens=False)
    answered = messages[-1].get("role") == "assistant" and whole[: len(asked)] == asked
    return LearningSequence(whole, len(asked) if answered and len(whole) > len(asked) else 1)
