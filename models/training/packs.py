"""Fill training sequences: several documents a sequence, and many questions behind one shared
beginning.

The labelled sets' instructions (up to 151 labels) are far longer than their texts, and a story
answers many questions. Questions of one group are therefore siblings behind one copy of its head.
Each sees only the head and itself, and has the positions it would have alone. So the network
computes exactly the same for a sibling as for the lone prompt.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from models.training import corpus
from models.training.copies import Copier
from models.training.curriculum.items import Group
from models.training.labelled import LONG_LENGTH
from models.training.looks import Finder, Look, Text
from models.training.sources import SHARES, Sources

TEXT_WEIGHT, ANSWER_WEIGHT = 1.0, 4.0
# A short answer is all that its question teaches; in a long one each token teaches something.
ANSWER_TOTAL = 12.0
# In a story most words may be others; the people and places of before may not.
SAID_AGAIN_WEIGHT = 3.0
LEAST_ROOM = 24
# Of long packs so many begin with one of the sets of many labels, which have room nowhere else.
MANY_LABELS_SHARE, MANY_LABELS = 0.7, {"banking77": 0.4, "clinc150": 0.6}

NO_HINT = -1


@dataclass
class Part:
    """One document of a pack; as ``Pack`` has them, positions of ``looks`` and ``unlike`` from its own beginning."""

    tokens: np.ndarray
    sibling: np.ndarray
    position: np.ndarray
    weight: np.ndarray
    hint: np.ndarray
    subject: np.ndarray
    looks: list[Look] = field(default_factory=list)
    unlike: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Pack:
    """One training sequence of ``T`` positions.

    A token sees earlier ones of its ``document`` that are shared (sibling 0) or of its own
    ``sibling``. ``weight[t]`` weighs the prediction of ``tokens[t + 1]``. ``hint[t]`` is the token that a
    middle layer should have in mind there, or ``NO_HINT``; ``subject[t]`` that of an early layer.
    ``looks`` say where heads look from the ends of questions. ``unlike`` has positions, and tokens that
    cannot follow there.
    """

    tokens: np.ndarray
    document: np.ndarray
    sibling: np.ndarray
    position: np.ndarray
    weight: np.ndarray
    hint: np.ndarray
    subject: np.ndarray
    looks: list[Look]
    unlike: list[tuple[int, int]]

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
        self._tokenizer, self._finder = tokenizer, Finder(tokenizer)
        self._copier = Copier(tokenizer, self._finder)
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
                name = self._rng.choices(list(MANY_LABELS), list(MANY_LABELS.values()))[0]
            if name == "text":
                parts.append(self._text(min(room, length // 2)))
            else:
                group = self._sources.draw(name, self._rng, room)
                parts.append(self.lay_out(group, room) or self._text(min(room, length // 4)))
            room -= len(parts[-1].tokens)
        sizes = [len(part.tokens) for part in parts]
        starts = np.cumsum([0, *sizes])

        def joined(name: str, filler: int = 0) -> np.ndarray:
            values = np.concatenate([getattr(part, name) for part in parts])
            return np.pad(values, (0, length - len(values)), constant_values=filler)

        document = np.repeat(np.arange(len(parts), dtype=np.int32), sizes)
        return Pack(
            tokens=joined("tokens").astype(np.int64),
            document=np.pad(document, (0, length - len(document)), constant_values=-1),
            sibling=joined("sibling"),
            position=joined("position"),
            weight=joined("weight"),
            hint=joined("hint", NO_HINT),
            subject=joined("subject", NO_HINT),
            looks=[
                look.moved(int(start))
                for part, start in zip(parts, starts[:-1], strict=True)
                for look in part.looks
            ],
            unlike=[
                (place + int(start), token)
                for part, start in zip(parts, starts[:-1], strict=True)
                for place, token in part.unlike
            ],
        )

    def _text(self, room: int) -> Part:
        start = self._rng.randrange(len(self._stream) - room)
        return _plain(self._stream[start : start + room])

    def lay_out(self, group: Group, room: int) -> Part | None:
        """Lay out a group, as many of its questions as fit; None if none does."""
        first = group.questions[0]
        if first.form == "text":
            tokens = np.concatenate([self._encode([first.tail])[0], self._end])
            return _plain(tokens) if len(tokens) <= room else None
        head = self._text_of(corpus.USER_HEAD, group.head, group.subjects)
        answered = self._encode([q.answer + corpus.TURN_END for q in group.questions])
        weight = np.full(len(head.tokens), group.head_weight, dtype=np.float32)
        weight[-1] = 0  # its next token is another one for each sibling
        whole = [_part(head.tokens, 0, 0, weight, head.subjects)]
        room, place = room - len(head.tokens), len(head.tokens)
        for number, (question, answer) in enumerate(
            zip(group.questions, answered, strict=True), start=1
        ):
            asked = self._text_of("", question.tail, question.subjects, corpus.ASSISTANT_HEAD)
            size, end = len(asked.tokens) + len(answer), len(asked.tokens) - 1
            if size > room:
                continue
            own = np.zeros(size, dtype=np.float32)
            # The prediction of each answer token, and of the turn's end.
            own[end:-1] = answer_weight(len(answer))
            subject = np.pad(asked.subjects, (0, len(answer)), constant_values=NO_HINT)
            tokens = np.concatenate([asked.tokens, answer])
            part = _part(tokens, number, len(head.tokens), own, subject)
            part.hint[end], part.subject[end] = (
                self._hint(question.hint),
                self._hint(question.about),
            )
            copies = self._copier.copies(
                question, head.tokens, part.tokens, len(asked.tokens), place
            )
            part.looks = self._finder.looks(question, head, asked, place) + copies.looks
            part.unlike = copies.unlike
            part.weight[copies.ahead] = np.maximum(part.weight[copies.ahead], SAID_AGAIN_WEIGHT)
            whole.append(part)
            room, place = room - size, place + size
        if len(whole) == 1:
            return None
        arrays = {
            name: np.concatenate([getattr(part, name) for part in whole])
            for name in ("tokens", "sibling", "position", "weight", "hint", "subject")
        }
        return Part(
            **arrays,
            looks=[look for part in whole for look in part.looks],
            unlike=[pair for part in whole for pair in part.unlike],
        )

    def _text_of(
        self, before: str, text: str, subjects: tuple[tuple[int, str], ...], behind: str = ""
    ) -> Text:
        """Encode a text between two others, with the subjects that its sentences end with."""
        encoded = self._tokenizer.encode(before + text + behind, add_special_tokens=False)
        named = np.full(len(encoded.ids), NO_HINT)
        ends = {end: i for i, (_, end) in enumerate(encoded.offsets)}
        for end, name in subjects:
            if (at := ends.get(len(before) + end)) is not None:
                named[at] = self._hint(name)
        return Text(np.array(encoded.ids, dtype=np.uint16), named)

    def _hint(self, word: str) -> int:
        """The first token of a word as it stands in a text."""
        return self._finder.ids(word)[0] if word else NO_HINT

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
    return _part(tokens, 0, 0, weight, np.full(len(tokens), NO_HINT))


def _part(
    tokens: np.ndarray, sibling: int, start: int, weight: np.ndarray, subject: np.ndarray
) -> Part:
    """A part of one sibling, whose positions count from ``start``."""
    size = len(tokens)
    siblings, positions = np.full(size, sibling, dtype=np.int32), np.arange(start, start + size)
    return Part(tokens, siblings, positions, weight, np.full(size, NO_HINT), subject.copy())
