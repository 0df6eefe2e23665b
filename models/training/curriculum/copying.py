"""The simplest exercises: to repeat, to look a letter up, to recall one fact of a list.

Everything else that is asked of a text is made of these, and a network learns them first.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from models.training.curriculum.arithmetic import of_split
from models.training.curriculum.items import (
    Group,
    Question,
    Split,
    alone,
    by_letter,
    chat,
    decide,
    mentions_of,
    shuffled,
    subjects_of,
)
from models.training.curriculum.lexicon import lexicon

REPEAT: dict[Split, tuple[str, ...]] = {
    "train": (
        "Repeat these words: {words}.",
        "Repeat: {words}.",
        "Say this again: {words}.",
        "Write these words once more: {words}.",
    ),
    "test": ("Say these words again: {words}.", "Write once more: {words}."),
}
RIGHT: dict[Split, tuple[str, ...]] = {
    "train": (
        "The right one is {word}.",
        "It is {word}.",
        "The answer is {word}.",
        "I mean {word}.",
    ),
    "test": ("The right answer is {word}.",),
}
WHICH: dict[Split, tuple[str, ...]] = {
    "train": ("Which one is it?", "Which is the right one?", "What is the answer?"),
    "test": ("Which one is the right one?",),
}
# What is told of each person, and how it is asked for.
FACTS: dict[str, tuple[str, dict[Split, tuple[str, ...]]]] = {
    "place": (
        "{a} is in the {x}.",
        {"train": ("Where is {a}?", "In which place is {a}?"), "test": ("In what place is {a}?",)},
    ),
    "thing": (
        "{a} has the {x}.",
        {"train": ("What does {a} have?", "Which thing has {a}?"), "test": ("Which thing does {a} have?",)},
    ),
    "colour": (
        "{a} likes {x}.",
        {"train": ("Which colour does {a} like?", "What does {a} like?"), "test": ("What colour does {a} like?",)},
    ),
    "number": (
        "{a} has {x} coins.",
        {
            "train": ("How many coins does {a} have?", "What number of coins does {a} have?"),
            "test": ("What number of coins has {a}?",),
        },
    ),
}  # fmt: skip
# A name that begins an answer has other tokens than the same name in a text: free answers have it behind a word.
SPOKEN = {
    "place": "In the {x}.", "thing": "The {x}.", "colour": "It is {x}.", "number": "{x} coins.",
}  # fmt: skip
BY_WHOM: dict[str, dict[Split, tuple[str, ...]]] = {
    "place": {"train": ("Who is in the {x}?",), "test": ("Who is it that is in the {x}?",)},
    "thing": {"train": ("Who has the {x}?",), "test": ("Who is it that has the {x}?",)},
    "colour": {"train": ("Who likes {x}?",), "test": ("Who is it that likes {x}?",)},
    "number": {"train": ("Who has {x} coins?",), "test": ("Who is it that has {x} coins?",)},
}


def repeat(rng: random.Random, split: Split, vocabulary: Sequence[str]) -> Group:
    """Ask for some words again."""
    words = of_split(split, lambda: rng.sample(list(vocabulary), rng.randint(2, 8)))
    listed = ", ".join(words)
    return alone("repeat", rng.choice(REPEAT[split]).format(words=listed), listed, words)


def look_up(rng: random.Random, split: Split) -> Group:
    """Name a word, and ask which of the labels it is: by the label and by its letter."""
    known = lexicon(split)
    pools = (known.places, known.things, known.colours, known.jobs, known.animals, known.goods)
    pool: Sequence[str] = rng.choice(pools)
    if rng.random() < 0.35:
        pool = [person.name for person in known.cast(rng, 10)]
    labels = rng.sample(list(pool), min(len(pool), rng.randint(3, 10)))
    questions = []
    for make in (decide, by_letter, by_letter):
        mixed = shuffled(rng, labels)
        questions.append(make("look up", rng.choice(WHICH[split]), mixed, labels[0]))
    return Group(f"{rng.choice(RIGHT[split]).format(word=labels[0])}\n\n", tuple(questions))


def recall(rng: random.Random, split: Split) -> Group:
    """Tell one fact of each of some people, and ask for some of them."""
    known = lexicon(split)
    people = [person.name for person in known.cast(rng, rng.randint(2, 6))]
    kind = rng.choice(list(FACTS))
    told, asked = FACTS[kind]
    pool: Sequence[object] = {
        "place": known.places, "thing": known.things, "colour": known.colours,
        "number": known.numbers,
    }[kind]  # fmt: skip
    facts = dict(zip(people, map(str, rng.sample(list(pool), len(people))), strict=True))
    questions: list[Question] = []
    for name in rng.sample(people, min(3, len(people))):
        by_name = rng.random() < 0.6
        words = rng.choice(asked[split] if by_name else BY_WHOM[kind][split])
        words, answer = words.format(a=name, x=facts[name]), facts[name] if by_name else name
        labels = shuffled(rng, list(facts.values()) if by_name else people)
        form = rng.choice((chat, decide, by_letter, by_letter))
        spoken = SPOKEN[kind].format(x=answer) if by_name else f"It is {answer}."
        question = (
            chat("recall", words, spoken)
            if form is chat
            else (decide if form is decide else by_letter)("recall", words, labels, answer)
        )
        again = mentions_of(question.answer, [answer]) if form in (chat, decide) else ()
        questions.append(
            replace(question, about=name if by_name else "", hint=answer, mentions=again)
        )
    sentences = [told.format(a=name, x=value) for name, value in facts.items()]
    different = {question.tail: question for question in questions}
    subjects = subjects_of(sentences, list(facts))
    return Group(f"{' '.join(sentences)}\n\n", tuple(different.values()), subjects=subjects)
