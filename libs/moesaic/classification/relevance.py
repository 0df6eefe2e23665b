"""Relevance: does a document answer a query?

Each pair is a question for yes or no. The query comes first, as the common prefix of its documents.
"""

from collections.abc import Sequence

from moesaic.classification.candidates import Read, odds, yes_or_no
from moesaic.classification.dialogue import Dialogue


class Relevance:
    """The judging of pairs, the same for all pairs of one request."""

    def __init__(self, dialogue: Dialogue, instruction: str | None = None) -> None:
        self._dialogue, self._candidates = dialogue, yes_or_no(dialogue)
        self._instruction = (instruction or "").strip() or dialogue.wording.words["relevance"]

    def read(self, query: str, document: str) -> Read:
        """Ask about one pair."""
        words = self._dialogue.wording.render(
            "relevance",
            instruction=self._instruction,
            query=query.strip(),
            document=document.strip(),
        )
        return Read(self._dialogue.ask(words), self._candidates)


def relevance_of(logprobs: Sequence[float]) -> tuple[float, float]:
    """Compute the probability of yes against no, and the mass of both together."""
    shares, mass = odds(logprobs)
    return shares[0], mass
