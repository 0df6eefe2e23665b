"""Rows for what learns from the demo's own: drawn alike for a seed, and none of a test split."""

import json
from argparse import Namespace
from pathlib import Path

from models.training import corpus
from models.training.curriculum.items import Group, Question
from models.training.texts import drawn, texts, turns


def test_a_group_becomes_conversations_and_a_text_stays_one() -> None:
    asked = Group(
        "Ann ran. ", (Question("who", "chat", "Who?", "Ann"), Question("", "text", "So.", ""))
    )

    assert turns(asked) == [
        {
            "messages": [
                {"role": "user", "content": "Ann ran. Who?"},
                {"role": "assistant", "content": "Ann"},
            ]
        },
        {"text": f"So.{corpus.END_OF_TEXT}"},
    ]


def test_rows_are_the_same_for_a_seed(tmp_path: Path) -> None:
    texts(Namespace(out=tmp_path / "new" / "rows.jsonl", rows=60, seed=3))

    rows = [json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").open(encoding="utf-8")]
    assert rows == list(drawn(60, 3))
    assert rows != list(drawn(60, 4))
    assert all(set(row) in ({"text"}, {"messages"}) for row in rows)
