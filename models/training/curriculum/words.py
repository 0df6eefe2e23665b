"""Letters of words, and lists of words and numbers: spell, turn round, count, sort."""

import random
from collections.abc import Sequence

from models.training.curriculum.arithmetic import of_split
from models.training.curriculum.items import Group, Split, alone

Wordings = dict[Split, tuple[str, ...]]

SPELL: Wordings = {
    "train": (
        "Spell the word {w}.",
        "Spell {w}.",
        "How do you spell {w}?",
        "What are the letters of {w}?",
        "Tell me how you spell the word {w}.",
    ),
    "test": ("What are the letters of the word {w}?", "Tell me the letters of {w}."),
}
BACKWARDS: Wordings = {
    "train": (
        "Spell {w} backwards.",
        "Spell the word {w} backwards.",
        "How do you spell {w} backwards?",
        "What are the letters of {w} from last to first?",
        "Tell me the letters of the word {w} backwards.",
    ),
    "test": ("How do you spell the word {w} from last to first?", "{w}: spell it backwards."),
}
COUNT_LETTERS: Wordings = {
    "train": (
        "How many letters does {w} have?",
        "How many letters does the word {w} have?",
        "How many letters are in {w}?",
        "Count the letters of {w}.",
        "What is the number of letters in the word {w}?",
    ),
    "test": ("How many letters are in the word {w}?", "Count the letters in {w}."),
}
ONE_LETTER: Wordings = {
    "train": (
        "What is the {end} letter of {w}?",
        "Which letter is the {end} one in {w}?",
        "Tell me the {end} letter of the word {w}.",
        "The word is {w}. What is its {end} letter?",
        "What is the {end} letter in {w}?",
    ),
    "test": ("Which is the {end} letter of the word {w}?", "Tell me the {end} letter in {w}."),
}
SORT: Wordings = {
    "train": (
        "Sort these words by the alphabet: {w}.",
        "Sort by the alphabet: {w}.",
        "Put these words in the order of the alphabet: {w}.",
        "What is the order of these words in the alphabet? {w}.",
        "Here are some words: {w}. Sort them by the alphabet.",
    ),
    "test": (
        "Here are some words: {w}. Put them in the order of the alphabet.",
        "Put by the alphabet: {w}.",
    ),
}
REVERSE: Wordings = {
    "train": (
        "Reverse this list: {w}.",
        "Reverse the order of these words: {w}.",
        "Say these words from last to first: {w}.",
        "Here is a list: {w}. Reverse it.",
        "Write this list backwards: {w}.",
    ),
    "test": (
        "Here is a list: {w}. Say it from last to first.",
        "Write these words backwards: {w}.",
    ),
}
COUNT_WORDS: Wordings = {
    "train": (
        "How many words are in this list? {w}.",
        "Count the words: {w}.",
        "Count these words: {w}.",
        "Here is a list: {w}. How many words does it have?",
        "How many words are these: {w}?",
    ),
    "test": ("Count the words in this list: {w}.", "Here is a list: {w}. Count its words."),
}
SORT_NUMBERS: Wordings = {
    "train": (
        "Sort these numbers: {w}.",
        "Sort from small to large: {w}.",
        "Put these numbers in order: {w}.",
        "What is the order of these numbers? {w}.",
        "Here are some numbers: {w}. Sort them.",
    ),
    "test": (
        "Here are some numbers: {w}. Put them in order.",
        "Sort these numbers from small to large: {w}.",
    ),
}


def spell(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for the letters of a word."""
    word = _word(rng, split, vocabulary, "spell")
    return _asked(rng, "spell", SPELL[split], ", ".join(word), w=word)


def backwards(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for the letters of a word from the last."""
    word = _word(rng, split, vocabulary, "backwards")
    return _asked(rng, "spell backwards", BACKWARDS[split], ", ".join(reversed(word)), w=word)


def count_letters(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask how many letters a word has: the answer counts them one by one."""
    word = _word(rng, split, vocabulary, "count")
    counted = ", ".join(f"{letter} {i}" for i, letter in enumerate(word, 1))
    answer = f"{counted}. It has {len(word)} letter{'s' if len(word) > 1 else ''}."
    return _asked(rng, "count letters", COUNT_LETTERS[split], answer, w=word)


def end_letter(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for the first or the last letter of a word."""
    end = rng.choice(("first", "last"))
    word = _word(rng, split, vocabulary, end)
    answer = word[0] if end == "first" else word[-1]
    return _asked(rng, "one letter", ONE_LETTER[split], answer, w=word, end=end)


def sort_words(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for 3 to 5 words in the order of the alphabet.

    In half of the lists the first letters alone tell the order.
    """
    count, apart = rng.randint(3, 5), rng.random() < 0.5

    def draw() -> list[str]:
        words: list[str] = []
        for word in rng.sample(vocabulary, min(len(vocabulary), 40)):
            if len(words) < count and not (apart and any(w[0] == word[0] for w in words)):
                words.append(word)
        return words

    words = of_split(split, draw)
    answer = sorted(words)
    return _asked(rng, "sort words", SORT[split], ", ".join(answer), answer, w=", ".join(words))


def reverse_words(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for a list of 3 to 6 words from its end."""
    count = rng.randint(3, 6)
    words = of_split(split, lambda: rng.sample(vocabulary, count))
    answer = words[::-1]
    return _asked(
        rng, "reverse a list", REVERSE[split], ", ".join(answer), answer, w=", ".join(words)
    )


def count_words(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask how many words a list of 3 to 9 has: the answer counts them one by one."""
    count = rng.randint(3, 9)
    words = of_split(split, lambda: rng.sample(vocabulary, count))
    counted = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
    answer = f"{counted}. There are {count} words."
    return _asked(rng, "count words", COUNT_WORDS[split], answer, words, w=", ".join(words))


def sort_numbers(rng: random.Random, split: Split) -> Group:
    """Ask for 3 to 5 numbers below 100 from the smallest up."""
    count = rng.randint(3, 5)
    numbers = of_split(split, lambda: rng.sample(range(1, 100), count))
    answer = ", ".join(map(str, sorted(numbers)))
    given = ", ".join(map(str, numbers))
    return _asked(rng, "sort numbers", SORT_NUMBERS[split], answer, w=given)


def _word(rng: random.Random, split: Split, vocabulary: Sequence[str], task: str) -> str:
    """Draw a word that the split has for a task.

    A word that one task lacks in training is known from the others: else nothing would tell the
    model its letters.
    """
    return of_split(split, lambda: (task, rng.choice(vocabulary)))[1]


def _asked(
    rng: random.Random,
    family: str,
    wordings: Sequence[str],
    answer: str,
    said_again: Sequence[str] = (),
    **values: str,
) -> Group:
    """Fill one of the wordings; the answer says these words again, in this order."""
    return alone(family, rng.choice(wordings).format(**values), answer, said_again)
