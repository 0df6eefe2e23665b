"""Texts that tell of one of a few ordered levels."""

import random
from collections.abc import Sequence

from models.training.curriculum.items import Group, Split, by_number, decide

FAMILY = "levels"

# Of each level, in order: training sentences, and test sentences of words that those have.
SCALES: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "mood": {
        "very sad": (
            (
                "{name} cried all day and could not stop.",
                "{name} wept bitterly and would not eat.",
                "{name} had never felt so much sorrow.",
            ),
            ("{name} wept all day and would not stop.", "{name} cried bitterly and could not eat."),
        ),
        "sad": (
            (
                "{name} looked down and sighed.",
                "{name} missed a friend and felt a little low.",
                "{name} was not glad about the news.",
            ),
            ("{name} sighed and felt a little low.", "{name} sighed about the news."),
        ),
        "calm": (
            (
                "{name} sat still and read a book.",
                "{name} felt neither glad nor sorry.",
                "{name} watched the river in peace.",
            ),
            ("{name} sat in peace and read.", "{name} sat still and watched the river."),
        ),
        "happy": (
            (
                "{name} smiled at the good news.",
                "{name} was glad to see a friend.",
                "{name} had a nice day and hummed a song.",
            ),
            ("{name} smiled and hummed a song.", "{name} was glad about the nice day."),
        ),
        "very happy": (
            (
                "{name} laughed and jumped for joy.",
                "{name} danced about and shouted with delight.",
                "{name} had never felt so much joy.",
            ),
            ("{name} danced for joy and laughed.", "{name} jumped about with delight."),
        ),
    },
    "temperature": {
        "freezing": (
            (
                "The lake was covered with thick ice.",
                "{name} found that the water in the bucket was ice.",
                "Snow fell, and the pipes froze.",
            ),
            ("The water in the pipes was ice.", "{name} saw that the lake froze."),
        ),
        "cold": (
            (
                "{name} put a warm coat and gloves on.",
                "A chilly wind made {name} shiver.",
                "{name} lit the stove because of the chilly air.",
            ),
            ("The chilly air made {name} shiver.", "{name} put gloves on in the chilly wind."),
        ),
        "mild": (
            (
                "{name} needed neither a coat nor shade.",
                "The air was soft, and a thin jacket was enough.",
                "It was a gentle spring day.",
            ),
            ("In the soft spring air a thin jacket was enough.", "The spring air was gentle."),
        ),
        "warm": (
            (
                "{name} sat in the sun without a jacket.",
                "It was a pleasant summer day in light clothes.",
                "{name} wore a thin shirt and felt fine.",
            ),
            ("{name} wore light clothes in the sun.", "{name} felt fine in the summer sun."),
        ),
        "hot": (
            (
                "{name} was sweating even in the shade.",
                "The stones burned under {name}'s feet.",
                "The heat was hard to bear.",
            ),
            ("{name} was sweating in the heat.", "The heat burned even in the shade."),
        ),
    },
    "speed": {
        "very slow": (
            (
                "{name} crept along like a snail.",
                "It took {name} an hour to cross the street.",
                "{name} hardly moved forward.",
            ),
            ("{name} hardly crept along.", "{name} moved like a snail."),
        ),
        "slow": (
            (
                "{name} strolled along and stopped often.",
                "{name} took plenty of time on the way.",
                "{name} walked without any hurry.",
            ),
            ("{name} strolled on without any hurry.", "{name} walked along and often stopped."),
        ),
        "steady": (
            (
                "{name} walked at the usual pace.",
                "{name} kept an even pace.",
                "{name} was neither early nor late.",
            ),
            ("{name} walked at an even pace.", "{name} kept the usual pace."),
        ),
        "fast": (
            (
                "{name} ran to catch the bus.",
                "{name} hurried down the street.",
                "{name} walked in great haste.",
            ),
            ("{name} ran down the street.", "{name} hurried to catch the bus."),
        ),
        "very fast": (
            (
                "{name} shot past like an arrow.",
                "{name} raced by, and nobody could keep up.",
                "{name} was gone in a flash.",
            ),
            ("{name} raced past like an arrow.", "{name} shot by in a flash."),
        ),
    },
    "size": {
        "tiny": (
            (
                "{name} found a thing no bigger than a grain of sand.",
                "{name} could hardly see it without a glass.",
                "It would fit on the tip of a pin.",
            ),
            ("It was no bigger than the tip of a pin.", "{name} could hardly see the grain."),
        ),
        "small": (
            (
                "{name} held it in one hand.",
                "It would fit in a pocket.",
                "{name} put it in a cup.",
            ),
            ("{name} held it in a cup.", "{name} put it in one pocket."),
        ),
        "large": (
            (
                "{name} needed both arms to carry it.",
                "It took up half of the table.",
                "It was as tall as {name}.",
            ),
            ("{name} needed both arms for it.", "It was as tall as the table."),
        ),
        "huge": (
            (
                "It was as big as a house.",
                "It was higher than the church, {name} said.",
                "{name} walked an hour to get around it.",
            ),
            ("It was higher than a house.", "It was as big as the church, {name} said."),
        ),
    },
    "amount": {
        "none": (
            (
                "The basket of {name} was empty.",
                "{name} had not a single apple.",
                "There was nothing left for {name}.",
            ),
            ("There was not a single apple left for {name}.", "{name} had an empty basket."),
        ),
        "few": (
            (
                "{name} had only two or three apples.",
                "There was hardly more than one apple for {name}.",
                "Only a couple of apples lay in the basket.",
            ),
            ("{name} had only a couple of apples.", "Only two or three lay in the basket."),
        ),
        "many": (
            (
                "The basket of {name} was full of apples.",
                "{name} had plenty of apples.",
                "{name} picked heaps of apples.",
            ),
            ("{name} picked a full basket of apples.", "{name} had heaps and plenty of apples."),
        ),
    },
}
ASKED: dict[Split, tuple[str, ...]] = {
    "train": (
        "What {scale} does the text tell of?",
        "Which {scale} fits the text?",
        "How would you rate the {scale}?",
        "Rate the {scale} in the text.",
        "Which level of {scale} is it?",
        "What is the {scale}?",
    ),
    "test": ("Rate the level of {scale} in the text.", "Which {scale} does the text tell of?"),
}
BESIDE = (
    "It was Monday.",
    "{name} was at home.",
    "It was late in the day.",
    "Nobody said a word.",
    "{name} told us so.",
)


def levels(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell of one level in 1 to 3 sentences, and ask which of 3 to 5 it is."""
    scale = rng.choice(list(SCALES))
    level = rng.choice(list(SCALES[scale]))
    patterns = SCALES[scale][level][1 if split == "test" else 0]
    told = rng.sample(patterns, rng.choice((1, 1, 2)))
    if rng.random() < 0.3:
        told.insert(rng.randint(0, len(told)), rng.choice(BESIDE))
    text = " ".join(told).format(name=rng.choice(names))
    questions = []
    for put in rng.sample((by_number, decide), rng.randint(1, 2)):
        asked = rng.choice(ASKED[split]).format(scale=scale)
        questions.append(put(FAMILY, asked, _levels(rng, scale, level), level))
    return Group(text + "\n\n", tuple(questions))


def _levels(rng: random.Random, scale: str, level: str) -> list[str]:
    """Leave some of the other levels out: the rest keep their order."""
    others = [other for other in SCALES[scale] if other != level]
    kept = rng.sample(others, rng.randint(2, len(others)))
    return [other for other in SCALES[scale] if other in kept or other == level]
