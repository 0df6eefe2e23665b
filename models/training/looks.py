"""Places where a question is answered: the positions that heads of two layers are told to look at.

A question has one word that its answer follows from (``hint``). The first of the heads looks for it
in what was told: in the text before the question, or in the document that is judged. The second
looks for it in what the question lists or states. A word that stands nowhere is told by looking at
the first token. A third head copies words into the answer (``copies.py``).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from models.training.curriculum.items import Question

Kind = Literal["told", "listed", "said"]


@dataclass(frozen=True)
class Look:
    """The last position before something is said, and where a head looks from there.

    Attributes:
        kind: which head.
        end: position in the sequence; of a question's end, or within an answer.
        at: positions of which any will do.
    """

    kind: Kind
    end: int
    at: np.ndarray

    def moved(self, places: int) -> "Look":
        """The same, with ``places`` tokens before it."""
        return Look(self.kind, self.end + places, self.at + places)


class Finder:
    """Finds words among tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        size = tokenizer.get_vocab_size()
        self._goes_on, self._is_word = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for token, token_id in tokenizer.get_vocab().items():
            self._goes_on[token_id] = token.isascii() and token.isalnum()
            self._is_word[token_id] = token.lstrip("Ġ").isalnum() and token[-1].isascii()

    def ids(self, word: str) -> list[int]:
        """Encode a word as it stands in a text."""
        spaced = word if word[0].isdigit() else f" {word}"
        return self._tokenizer.encode(spaced, add_special_tokens=False).ids

    def ends(self, word: str, tokens: np.ndarray, inside: bool = False) -> np.ndarray:
        """Find where the word ends, wherever it stands whole; with ``inside``, behind another word only."""
        wanted = self.ids(word)
        starts = self.starts(wanted, tokens)
        before, whole = tokens[np.maximum(starts - 1, 0)], np.ones(len(starts), dtype=bool)
        if word[0].isdigit():
            whole &= (starts == 0) | ~self._goes_on[before]
        if inside:
            whole &= (starts > 0) & self._is_word[before]
        found: np.ndarray = starts[whole] + len(wanted) - 1
        return found

    def looks(self, question: Question, head: "Text", tail: "Text", place: int) -> list[Look]:
        """Find where to look from the end of a question whose tail begins at position ``place``."""
        if not question.hint:
            return []
        found, end, first = list[Look](), place + len(tail.tokens) - 1, np.array([0])
        judged, denied = question.form == "relevance", question.answer == "no"
        if question.form == "decide" and question.answer != question.hint:
            # A letter, of options that stand before the text.
            listed = self.ends(question.hint, head.tokens)
            return [Look("listed", end, listed)] if len(listed) else []
        told = self._told(question.hint, tail if judged else head) + (place if judged else 0)
        if len(told) or (judged and denied):
            found.append(Look("told", end, told if len(told) else first))
        if judged:
            listed = self.ends(question.hint, head.tokens)  # the query is a label
            if len(listed):
                found.append(Look("listed", end, listed))
        elif question.form in ("letter", "decide", "predicate"):
            listed = self.ends(question.hint, tail.tokens)
            if not len(listed):
                listed = self._quoted(question.hint, tail.tokens)
            listed = listed + place
            if len(listed) or (question.form == "predicate" and denied):
                found.append(Look("listed", end, listed if len(listed) else first))
        return found

    def begins_a_word(self, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """True where no word goes on at these positions."""
        begins: np.ndarray = (starts == 0) | ~self._is_word[tokens[np.maximum(starts - 1, 0)]]
        return begins

    def _quoted(self, word: str, tokens: np.ndarray) -> np.ndarray:
        """Find where a word in quotation marks ends."""
        quoted = self._tokenizer.encode(f' "{word}', add_special_tokens=False).ids
        return self.starts(quoted, tokens) + len(quoted) - 1

    def starts(self, wanted: list[int], tokens: np.ndarray) -> np.ndarray:
        """Find where these tokens stand, and a word ends with them."""
        if len(tokens) < len(wanted):
            return np.array([], dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
        starts = np.flatnonzero((windows == wanted).all(axis=1))
        behind = starts + len(wanted)
        whole = (behind == len(tokens)) | ~self._goes_on[
            tokens[np.minimum(behind, len(tokens) - 1)]
        ]
        found: np.ndarray = starts[whole]
        return found

    def _told(self, word: str, text: "Text") -> np.ndarray:
        """Find where a word stands; a person's name within sentences, and at the ends of those about them.

        At the name with which a sentence begins, nothing of the sentence is known yet.
        """
        about = np.flatnonzero(text.subjects == self.ids(word)[0])
        stands = self.ends(word, text.tokens, inside=len(about) > 0)
        return np.union1d(about, stands)


@dataclass(frozen=True)
class Text:
    """Tokens, and at the last one of a sentence the first one of the name of its person.

    Attributes:
        tokens: ``[T]``.
        subjects: ``[T]``, a token or less than 0.
    """

    tokens: np.ndarray
    subjects: np.ndarray
