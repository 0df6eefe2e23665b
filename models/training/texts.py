"""Write turns of the training split as the demo is asked them, for what learns from its own rows."""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any

from models.training import corpus
from models.training.curriculum.items import Group
from models.training.sources import SHARES, Sources

ROOM = 700  # tokens of a group of a labelled set, about
PROSE_CHARACTERS = 1500  # of one piece of a book
QUESTIONS = 3  # about one story, at most

Row = dict[str, Any]


def texts(arguments: argparse.Namespace) -> None:
    """Write JSON lines with ``messages`` or a ``text`` each; no row is of a test split."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        for row in drawn(arguments.rows, arguments.seed):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def drawn(count: int, seed: int) -> Iterator[Row]:
    """Draw rows from all sources in the shares of training, the same for a seed."""
    rng, sources = random.Random(f"texts {seed}"), Sources()
    documents = [document for name in corpus.TEXTS for document in corpus.read_documents(name)[0]]
    written = 0
    while written < count:
        name = rng.choices(list(SHARES), list(SHARES.values()))[0]
        rows = [_prose(rng, documents)] if name == "text" else turns(sources.draw(name, rng, ROOM))
        for row in rows[:QUESTIONS]:
            yield row
            written += 1
            if written == count:
                return


def turns(group: Group) -> list[Row]:
    """Write each question of a group with its answer, as a conversation of two turns; plain text as it is."""
    return [
        {"text": question.tail + corpus.END_OF_TEXT}
        if question.form == "text"
        else {
            "messages": [
                {"role": "user", "content": group.head + question.tail},
                {"role": "assistant", "content": question.answer},
            ]
        }
        for question in group.questions
    ]


def _prose(rng: random.Random, documents: list[str]) -> Row:
    document = rng.choice(documents)
    start = rng.randrange(max(1, len(document) - PROSE_CHARACTERS))
    return {"text": document[start : start + PROSE_CHARACTERS]}
