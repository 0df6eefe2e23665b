"""The rows of the curriculum: questions behind a shared text, worded as the gateway words them.

A row belongs to the training or to the test split. The test split has names, numbers and sentence
patterns of its own; a row's ``Split`` says which ones its words were drawn from.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.classification.prompts import SYMBOLS, label_values
from moesaic.classification.wording import PACKAGED

Split = Literal["train", "test"]
Form = Literal["chat", "predicate", "decide", "letter", "number", "relevance", "text"]
NUMBERS = "0123456789"


@dataclass(frozen=True)
class Mention:
    """A word of an answer that may have been named before.

    Attributes:
        start: index of its first character in the answer.
        word: as it stands there.
        unlike: words that cannot stand in its place.
    """

    start: int
    word: str
    unlike: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """One question, and the right answer.

    Attributes:
        family: the skill that it asks for.
        form: how it is put: ``chat`` is answered freely, ``text`` is no question but plain text.
        tail: the user turn behind the group's head.
        answer: the assistant's turn.
        labels: the answers that the question allows; none where it is answered freely.
        hint: a word that the answer follows from. Training asks a middle layer for it, so that a letter is looked up
            by its word, and a statement judged by what is so; nothing else sees it.
        about: the person whom the question names.
        subjects: as of a group, in the tail.
        mentions: words of the answer that are said again. Training asks a head to look where they stood.
    """

    family: str
    form: Form
    tail: str
    answer: str
    labels: tuple[str, ...] = ()
    hint: str = ""
    about: str = ""
    subjects: tuple[tuple[int, str], ...] = ()
    mentions: tuple[Mention, ...] = ()


@dataclass(frozen=True)
class Group:
    """Questions whose user turns begin with the same ``head``, which ends where a token ends.

    Attributes:
        head_weight: of each of the head's tokens in training; 0 where it is not worth learning.
        subjects: where a sentence's last word ends in the head, and the person whom it is about. Training asks an
            early layer for the name there, so that what is told of a person is found by the name.
    """

    head: str
    questions: tuple[Question, ...]
    head_weight: float = 0.0
    subjects: tuple[tuple[int, str], ...] = ()


def alone(family: str, asked: str, answer: str, said_again: Sequence[str] = ()) -> Group:
    """Make a group of one free question, whose answer says some of its words again in this order."""
    mentions = mentions_of(answer, said_again)
    return Group("", (Question(family, "chat", asked, answer, mentions=mentions),))


def mentions_of(answer: str, words: Sequence[str]) -> tuple[Mention, ...]:
    """Find words in an answer, one behind the other."""
    found, start = [], 0
    for word in words:
        start = answer.index(word, start)
        found.append(Mention(start, word))
        start += len(word)
    return tuple(found)


def chat(family: str, asked: str, answer: str) -> Question:
    """Ask freely behind a text."""
    return Question(family, "chat", asked, answer)


def predicate(family: str, statement: str, holds: bool, hint: str = "") -> Question:
    """Ask whether a statement is true of the text, as ``/v1/decisions`` does."""
    tail = _behind_input("predicate", instructions=statement)
    return Question(family, "predicate", tail, "yes" if holds else "no", ("yes", "no"), hint)


def decide(family: str, asked: str, labels: Sequence[str], answer: str) -> Question:
    """Ask which of the labels, by the label itself."""
    tail = _behind_input("decide", instructions=asked, **label_values(labels, SYMBOLS))
    return Question(family, "decide", tail, answer, tuple(labels))


def by_letter(family: str, asked: str, labels: Sequence[str], answer: str) -> Question:
    """Ask which of the labels, by its letter."""
    values = label_values(labels, SYMBOLS)
    tail = _behind_input("decide_by_letter", instructions=asked, **values)
    letters = tuple(SYMBOLS[: len(labels)])
    hint = "" if " " in answer else answer
    return Question(family, "letter", tail, letters[list(labels).index(answer)], letters, hint)


def by_number(family: str, asked: str, levels: Sequence[str], answer: str) -> Question:
    """Ask which of the ordered levels, by its number from 0."""
    values = label_values(levels, NUMBERS)
    tail = _behind_input("decide_by_number", instructions=asked, **values)
    numbers = tuple(NUMBERS[: len(levels)])
    return Question(family, "number", tail, numbers[list(levels).index(answer)], numbers, answer)


def _behind_input(template: str, **values: str) -> str:
    """Fill the part of a template behind its input, which opens every user turn of a group."""
    whole = PACKAGED.render(template, input="", **values)
    return whole.removeprefix("\n\n")


def subjects_of(sentences: Sequence[str], names: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Find where the last word of each sentence ends, when they stand in a row with a space between."""
    found, start = [], 0
    for sentence, name in zip(sentences, names, strict=True):
        if name:
            found.append((start + len(sentence.rstrip('.!?"')), name))
        start += len(sentence) + 1
    return tuple(found)


def shuffled(rng: random.Random, values: Sequence[str]) -> list[str]:
    """Return the values in another order."""
    return rng.sample(list(values), len(values))
