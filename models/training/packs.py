"""Fill training sequences: several documents a sequence, and many questions behind one shared
beginning.

The labelled sets' instructions (up to 151 labels) are far longer than their texts, and a story
answers many questions. Questions of one group are therefore siblings: they stand behind one copy of
its head, each sees that and itself only, and each has the positions it would have alone. What the
network computes for a sibling is exactly what it would compute for the lone prompt.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from models.training import corpus
from models.training.curriculum.items import Group
from models.training.sources import SHARES, Sources

TEXT_WEIGHT, ANSWER_WEIGHT = 1.0, 4.0
# A short answer is all that its question teaches; in a long one each token teaches something.
ANSWER_TOTAL = 12.0
LEAST_ROOM = 24
# Only long packs have room for all labels of these sets; half of them begin with one.
LONG_LENGTH, MANY_LABELS_SHARE, MANY_LABELS = 1024, 0.5, ("banking77", "clinc150")

NO_HINT = -1

# Tokens, sibling, position, weight, hint, subject.
Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Pack:
    """One training sequence of ``T`` positions.

    A token sees earlier ones of its ``document`` that are shared (sibling 0) or of its own
    ``sibling``. ``weight[t]`` weighs the prediction of ``tokens[t + 1]``. ``hint[t]`` is the token that a
    middle layer should have in mind there, or ``NO_HINT``; ``subject[t]`` that of an early layer.
    """

    tokens: np.ndarray
    document: np.ndarray
    sibling: np.ndarray
    position: np.ndarray
    weight: np.ndarray
    hint: np.ndarray
    subject: np.ndarray

    def mask(self) -> np.ndarray:
        """Bool ``[T, T]``, true where the row's token sees the column's."""
        same = self.document[:, None] == self.document[None, :]
        open_ = (self.sibling[None, :] == 0) | (self.sibling[:, None] == self.sibling[None, :])
        return np.tril(same & open_)


class Packer:
    """Draws packs from all sources, in their shares, deterministically for a seed."""

    def __init__(
        self, tokenizer: Tokenizer, seed: int, shares: Mapping[str, float] = SHARES
    ) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._sources, self._shares = Sources(), shares
        documents = [d for name in corpus.TEXTS for d in corpus.read_documents(name)[0]]
        self._end = np.array([tokenizer.token_to_id(corpus.END_OF_TEXT)], dtype=np.uint16)
        self._stream = np.concatenate(
            [np.concatenate([ids, self._end]) for ids in corpus.encode(tokenizer, documents)]
        )

    def pack(self, length: int) -> Pack:
        """Fill one sequence of ``length`` tokens."""
        parts: list[Part] = []
        room = length
        while room > LEAST_ROOM:
            name = self._rng.choices(list(self._shares), list(self._shares.values()))[0]
            if room >= LONG_LENGTH and self._rng.random() < MANY_LABELS_SHARE:
                name = self._rng.choice(MANY_LABELS)
            if name == "text":
                parts.append(self._text(min(room, length // 2)))
            else:
                group = self._sources.draw(name, self._rng, room)
                parts.append(self._group(group, room) or self._text(min(room, length // 4)))
            room -= len(parts[-1][0])
        document = np.concatenate(
            [np.full(len(p[0]), i, dtype=np.int32) for i, p in enumerate(parts)]
        )
        tokens, sibling, position, weight, hint, subject = (
            np.concatenate([p[i] for p in parts]) for i in range(6)
        )
        fill = length - len(tokens)
        return Pack(
            np.pad(tokens.astype(np.int64), (0, fill)),
            np.pad(document, (0, fill), constant_values=-1),
            np.pad(sibling, (0, fill)),
            np.pad(position, (0, fill)),
            np.pad(weight, (0, fill)),
            np.pad(hint, (0, fill), constant_values=NO_HINT),
            np.pad(subject, (0, fill), constant_values=NO_HINT),
        )

    def _text(self, room: int) -> Part:
        start = self._rng.randrange(len(self._stream) - room)
        return _plain(self._stream[start : start + room])

    def _group(self, group: Group, room: int) -> Part | None:
        """Lay out a group, as many of its questions as fit; None if none does."""
        first = group.questions[0]
        if first.form == "text":
            tokens = np.concatenate([self._encode([first.tail])[0], self._end])
            return _plain(tokens) if len(tokens) <= room else None
        head, named = self._head(group)
        asked = self._encode([q.tail + corpus.ASSISTANT_HEAD for q in group.questions])
        answered = self._encode([q.answer + corpus.TURN_END for q in group.questions])
        laid: list[np.ndarray] = [head]
        sibling = [np.zeros(len(head), dtype=np.int32)]
        position = [np.arange(len(head))]
        weight = [np.full(len(head), group.head_weight, dtype=np.float32)]
        weight[0][-1] = 0  # its next token is another one for each sibling
        hint, subject = [np.full(len(head), NO_HINT)], [named]
        room -= len(head)
        for number, (ask, answer) in enumerate(zip(asked, answered, strict=True), start=1):
            size = len(ask) + len(answer)
            if size > room:
                continue
            laid += [ask, answer]
            sibling.append(np.full(size, number, dtype=np.int32))
            position.append(np.arange(len(head), len(head) + size))
            own = np.zeros(size, dtype=np.float32)
            # The prediction of each answer token, and of the turn's end.
            own[len(ask) - 1 : -1] = answer_weight(len(answer))
            weight.append(own)
            hint.append(np.full(size, NO_HINT))
            subject.append(hint[-1].copy())
            question = group.questions[number - 1]
            hint[-1][len(ask) - 1] = self._hint(question.hint)
            subject[-1][len(ask) - 1] = self._hint(question.about)
            room -= size
        if len(laid) == 1:
            return None
        return tuple(
            np.concatenate(rows) for rows in (laid, sibling, position, weight, hint, subject)
        )  # type: ignore[return-value]

    def _head(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """A group's head as tokens, and the subjects that its sentences end with."""
        text = corpus.USER_HEAD + group.head
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        named = np.full(len(encoded.ids), NO_HINT)
        ends = {end: i for i, (_, end) in enumerate(encoded.offsets)}
        for end, name in group.subjects:
            if (at := ends.get(len(corpus.USER_HEAD) + end)) is not None:
                named[at] = self._hint(name)
        return np.array(encoded.ids, dtype=np.uint16), named

    def _hint(self, word: str) -> int:
        """The first token of a word as it stands in a text."""
        if not word:
            return NO_HINT
        spaced = word if word[0].isdigit() else f" {word}"
        return int(self._tokenizer.encode(spaced, add_special_tokens=False).ids[0])

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
            for text in texts
        ]


def answer_weight(tokens: int) -> float:
    """Weigh each token of an answer: short answers have more of it."""
    return min(ANSWER_WEIGHT, max(1.0, ANSWER_TOTAL / tokens))


def _plain(tokens: np.ndarray) -> Part:
    weight = np.full(len(tokens), TEXT_WEIGHT, dtype=np.float32)
    weight[-1] = 0
    none = np.full(len(tokens), NO_HINT)
    return tokens, np.zeros(len(tokens), dtype=np.int32), np.arange(len(tokens)), weight, none, none
