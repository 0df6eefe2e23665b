"""Words that an answer says again: where each of their tokens stood, and what cannot stand there.

Ahead of each token of such a word, a head looks at that token where the word stood before. Behind the
word, and behind a pronoun, it looks at the first token of all: there is nothing to be copied.
"""

from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from models.training import corpus
from models.training.curriculum.items import Question
from models.training.looks import Finder, Look

PRONOUNS = ("she", "he", "She", "He")


@dataclass(frozen=True)
class Copies:
    """The copied words of one answer.

    Attributes:
        looks: where the head looks, by positions in the document.
        ahead: indices, in question and answer, of what stands ahead of a copied token.
        unlike: positions, and tokens that cannot follow there.
    """

    looks: list[Look] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    unlike: list[tuple[int, int]] = field(default_factory=list)


class Copier:
    """Finds the words that answers say again."""

    def __init__(self, tokenizer: Tokenizer, finder: Finder) -> None:
        self._tokenizer, self._finder = tokenizer, finder
        encoded = [ids for word in PRONOUNS for ids in self._both(word)]
        self._pronouns = [ids[0] for ids in encoded if len(ids) == 1]

    def copies(
        self, question: Question, head: np.ndarray, own: np.ndarray, asked: int, place: int
    ) -> Copies:
        """Find what the answer of a question mentions, in the shared head or before in its own tokens.

        Args:
            question: says what its answer mentions.
            head: tokens that it shares with others.
            own: its own, the answer's behind them.
            asked: so many of these are the question's.
            place: position of the first of them in the document.
        """
        found = Copies()
        if not question.mentions:
            return found
        whole, starts = np.concatenate([head, own]), self._token_starts(question.answer)
        positions = np.concatenate([np.arange(len(head)), place + np.arange(len(own))])
        for mention in question.mentions:
            if mention.start not in starts:
                continue
            begin = asked + starts[mention.start]
            for index, at in self._where(mention.word, whole, len(head) + begin):
                found.looks.append(Look("said", int(positions[index]), positions[at]))
                found.ahead.append(index - len(head))
            found.unlike.extend(
                (place + begin - 1, token)
                for token in (self._finder.ids(word)[0] for word in mention.unlike)
                if token != own[begin]
            )
        nothing = {index + 1 for index in found.ahead}
        nothing.update(np.flatnonzero(np.isin(own, self._pronouns)).tolist())
        for index in sorted(nothing.difference(found.ahead)):
            if asked <= index < len(own) - 1:
                found.looks.append(Look("said", place + index, np.array([0])))
        return found

    def _where(self, word: str, tokens: np.ndarray, begin: int) -> list[tuple[int, np.ndarray]]:
        """Find, for each token of the word at ``begin``, the index ahead of it and where it stood before."""
        spaced, bare = self._both(word)
        here = (ids for ids in (spaced, bare) if tokens[begin : begin + len(ids)].tolist() == ids)
        size, known = len(next(here, ())), tokens[:begin]
        opening = self._finder.starts(bare, known)
        opening = opening[self._finder.begins_a_word(opening, known)]
        before = [(start, len(spaced)) for start in self._finder.starts(spaced, known)]
        before += [(start, len(bare)) for start in opening]
        if not before:
            return []
        return [
            (begin + i - 1, np.array([start + min(i, num - 1) for start, num in before]))
            for i in range(size)
        ]

    def _both(self, word: str) -> tuple[list[int], list[int]]:
        """Encode a word behind a space, and at the beginning of a text."""
        encode = self._tokenizer.encode
        spaced, bare = (encode(w, add_special_tokens=False).ids for w in (f" {word}", word))
        return spaced, bare

    def _token_starts(self, answer: str) -> dict[int, int]:
        """Find the token that each character begins, the space before it left aside."""
        encoded = self._tokenizer.encode(answer + corpus.TURN_END, add_special_tokens=False)
        return {
            start + (answer[start : start + 1] == " "): index
            for index, (start, _) in enumerate(encoded.offsets)
        }
