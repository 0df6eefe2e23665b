"""Held-out questions of the demo model's tasks, as requests to be sent, and the judgement of answers."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.common.suite import DEMO
from models.training.curriculum.items import Group, Question
from models.training.judge import drawn_rows, judged
from moesaic.services.gateway.language import Language


class BurstQuestions:
    """Questions in a drawn order, the same in every arm, asked again from the first when none is left."""

    def __init__(self, kinds: Sequence[tuple[str, str]], of_a_kind: int, max_tokens: int) -> None:
        """Draw up to ``of_a_kind`` rows of each family and form.

        Raises:
            ValueError: the card has no such family or form.
        """
        drawn: dict[tuple[str, str], list[tuple[Group, Question]]] = defaultdict(list)
        for group, question in drawn_rows(of_a_kind):
            drawn[question.family, question.form].append((group, question))
        if missing := [kind for kind in kinds if not drawn[kind]]:
            raise ValueError(f"no rows of {missing}; there are {sorted(k for k in drawn if k[0])}")
        self._rows = [row for kind in kinds for row in drawn[kind]]
        random.Random("brownout burst").shuffle(self._rows)
        self._language, self._max_tokens = Language(DEMO), max_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def body(self, number: int, salt: str) -> dict[str, Any]:
        """Make the request of a number; nothing of it is cached from others, nor for them."""
        group, question = self._rows[number % len(self)]
        return {
            "model": DEMO.name,
            "messages": [{"role": "user", "content": group.head + question.tail}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": f"{salt} {number}",
        }

    def is_right(self, number: int, token_ids: Sequence[int]) -> bool:
        """Judge an answer as the card does."""
        group, question = self._rows[number % len(self)]
        return judged(self._language, group, question, (), list(token_ids)).right
