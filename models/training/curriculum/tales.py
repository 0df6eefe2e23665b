"""Stories to be told and continued."""

import random

from models.training.curriculum.items import Group, Question, Split, alone
from models.training.curriculum.stories import story
from models.training.curriculum.telling import Teller

CONTINUE = {
    "train": (
        "Continue this story.",
        "Continue the story.",
        "Go on with this story.",
        "How does this story go on?",
    ),
    "test": ("Go on with the story.",),
}
TELL = {
    "train": (
        "Tell me a story about {who}.",
        "Tell a story about {who}.",
        "Write a short story about {who}.",
    ),
    "test": ("Write a story about {who}.",),
}


def continued(rng: random.Random, split: Split) -> Group:
    """Ask for the rest of a story."""
    told = story(rng, split)
    start, rest = parted(rng, told)
    return alone("continue", asked(rng, split, start), rest)


def asked(rng: random.Random, split: Split, start: str) -> str:
    """Word the wish for the rest of a story."""
    return f"{rng.choice(CONTINUE[split])}\n\n{start}"


def parted(rng: random.Random, told: Teller) -> tuple[str, str]:
    """Part a story behind its first sentences: at least two, at most two thirds."""
    count = rng.randint(2, max(2, 2 * len(told.sentences) // 3))
    return " ".join(told.sentences[:count]), " ".join(told.sentences[count:])


def requested(rng: random.Random, split: Split) -> Group:
    """Ask for a story about some of its people and things."""
    told = story(rng, split)
    names = list(told.people)
    who = names[0] if rng.random() < 0.5 or len(names) == 1 else f"{names[0]} and {names[1]}"
    coloured = [(t, c) for t, c in told.state.colour.items() if f" {c} {t}" in told.text]
    if coloured and rng.random() < 0.6:
        thing, colour = coloured[0]
        who = f"{who} and a {colour} {thing}"
    return alone("tell", rng.choice(TELL[split]).format(who=who), told.text)


def plain(rng: random.Random, split: Split) -> Group:
    """Tell a story as plain text, without a turn around it."""
    return Group("", (Question("plain story", "text", story(rng, split).text, ""),))
