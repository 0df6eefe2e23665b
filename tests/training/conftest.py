"""The demo's tokenizer, and the beginnings of every set."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.training import corpus


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(corpus.__file__).parents[1] / "demo/tokenizer.json"))


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """The beginnings of every set: all of its documents, questions and conversations take long to encode."""
    documents, task, conversations = corpus.read_documents, corpus.read_task, corpus.conversations()

    def some_rows(name: str, split: str) -> corpus.Task:
        return replace(whole := task(name, split), rows=whole.rows[:500])

    def beginnings(name: str) -> tuple[list[str], list[str]]:
        return [document[:5000] for document in documents(name)[0][:20]], []

    pairs = {name: pairs[:500] for name, pairs in conversations.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "read_documents", beginnings)
        patch.setattr(corpus, "read_task", some_rows)
        patch.setattr(corpus, "conversations", lambda: pairs)
        yield
