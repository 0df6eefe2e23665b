"""Relevance: does a document answer to a query? One question for yes or no a pair, behind the query as the common
prefix of its documents."""

from collections.abc import Sequence

from moesaic.classification.candidates import Read, odds, yes_or_no
from moesaic.classification.dialogue import Dialogue


class Relevance:
    """How pairs are judged: the same for all of one request."""

    def __init__(self, dialogue: Dialogue, instruction: str | None = None) -> None:
        self._dialogue, self._candidates = dialogue, yes_or_no(dialogue)
        self._instruction = (instruction or "").strip() or dialogue.wording.words["relevance"]

    def read(self, query: str, document: str) -> Read:
        """What is asked about one pair."""
        words = self._dialogue.wording.render(
            "relevance",
            instruction=self._instruction,
            query=query.strip(),
            document=document.strip(),
        )
        return Read(self._dialogue.ask(words), self._candidates)


def relevance_of(logprobs: Sequence[float]) -> tuple[float, float]:
    """The probability of yes against no, and the mass of both together."""
    shares, mass = odds(logprobs)
    return shares[0], mass
