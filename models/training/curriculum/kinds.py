"""The kind of thing that a word names."""

import random

from models.training.curriculum.arithmetic import of_split
from models.training.curriculum.items import Group, Split, by_letter, decide

FAMILY = "kinds"
KINDS = {
    "animal": (
        "dog cat horse cow sheep goat pig hen duck goose fox wolf bear rabbit mouse frog bee"
    ),
    "fruit": (
        "apple pear plum cherry grape lemon peach banana melon fig apricot mango strawberry lime"
    ),
    "tool": "hammer saw axe spade rake drill chisel shovel trowel wrench file screwdriver hoe broom",
    "colour": "red blue green yellow white black brown grey pink purple violet scarlet beige",
    "place": (
        "village town city forest island valley harbour market school church station beach park "
        "castle hill"
    ),
    "job": (
        "baker teacher doctor nurse farmer sailor painter miller weaver tailor butcher carpenter "
        "singer driver judge"
    ),
    "month": (
        "January February March April May June July August September October November December"
    ),
    "number": ("two three four five six seven eight nine ten eleven twelve twenty thirty forty"),
    "drink": "water milk tea coffee juice beer wine cocoa lemonade cider soda cola ale broth",
    "clothing": (
        "shirt coat hat shoe sock glove scarf skirt dress trousers jacket boot belt cap apron"
    ),
}

ASKED: dict[Split, tuple[str, ...]] = {
    "train": (
        "What kind of thing is {w}?",
        "Which kind of thing is {w}?",
        "What is {w}?",
        "Which of these is {w}?",
        "What kind of thing does the word {w} name?",
        "Which word says what {w} is?",
    ),
    "test": ("Which kind of thing does {w} name?", "Which of these words says what {w} is?"),
}
ANY: dict[Split, tuple[str, ...]] = {
    "train": (
        "{w}",
        "The word is {w}.",
        "Here is a word: {w}.",
        "I am thinking of the word {w}.",
        "She wrote {w} on the paper.",
        "Today we learn the word {w}.",
    ),
    "test": ("I am thinking of this word: {w}.", "Today she wrote the word {w} on the paper."),
}
IN_USE: dict[str, dict[Split, tuple[str, ...]]] = {
    "animal": {
        "train": ("The {w} slept in the shade.", "We fed a young {w} in the field."),
        "test": ("The young {w} slept in the field.",),
    },
    "fruit": {
        "train": ("She ate a sweet {w}.", "The {w} on the tree is ripe."),
        "test": ("She ate a ripe {w} under the tree.",),
    },
    "tool": {
        "train": ("He took the {w} to work with it.", "The {w} hangs in the shed."),
        "test": ("He took the {w} from the shed.",),
    },
    "colour": {
        "train": ("They painted the door {w}.", "The wall of the house is {w}."),
        "test": ("They painted the wall {w}.",),
    },
    "place": {
        "train": ("We walked to the {w}.", "They met near the {w}."),
        "test": ("We met at the {w}.",),
    },
    "job": {
        "train": ("Her father is a {w}.", "He wants to become a {w}."),
        "test": ("Her father wants to be a {w}.",),
    },
    "month": {
        "train": ("We met in {w} last year.", "It often rains in {w}."),
        "test": ("Last year it rained in {w}.",),
    },
    "number": {
        "train": ("There were {w} chairs in the room.", "She counted to {w}."),
        "test": ("She counted {w} chairs.",),
    },
    "drink": {
        "train": ("He drank a cup of {w}.", "Pour me some {w}."),
        "test": ("Pour him a cup of {w}.",),
    },
    "clothing": {
        "train": ("He put the {w} on because of the cold.", "She washed her {w}."),
        "test": ("She put her {w} on.",),
    },
}


def kinds(rng: random.Random, split: Split) -> Group:
    """Give a word, alone or in a sentence, and ask for its kind among 4 to 10.

    All words are in both splits, as the kind of an unseen word cannot be known. Only the test split
    has its sentences, its wordings, and its pairs of words and kinds.
    """
    kind = rng.choice(list(KINDS))
    word = rng.choice(KINDS[kind].split())
    patterns = (ANY if rng.random() < 0.6 else IN_USE[kind])[split]
    told = rng.choice(patterns).format(w=word)
    questions = []
    for put in rng.sample((decide, by_letter), rng.randint(1, 2)):
        _, *labels = of_split(split, lambda: (word, *_labels(rng, kind)))
        asked = rng.choice(ASKED[split]).format(w=word)
        questions.append(put(FAMILY, asked, labels, kind))
    return Group(told + "\n\n", tuple(questions))


def _labels(rng: random.Random, kind: str) -> list[str]:
    """Draw labels in any order, the right one among them."""
    others = [other for other in KINDS if other != kind]
    labels = [kind, *rng.sample(others, rng.randint(3, len(others)))]
    return rng.sample(labels, len(labels))
