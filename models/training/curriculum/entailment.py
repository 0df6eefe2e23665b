"""Conclusions from one to three sentences: yes, no or unknown."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from models.training.curriculum import items
from models.training.curriculum.items import Group, Question, Split, shuffled

FAMILY = "entailment"
VERDICTS = ("yes", "no", "unknown")

# A statement, begun with a small letter unless with a name, and whether it follows.
Statement = tuple[str, str]
Patterns = dict[Split, tuple[str, ...]]

# No wording asks whether the text says so: then no would be right of what is unknown.
ASKED: Patterns = {
    "train": (
        "Does it follow that {s}?",
        "Is it true that {s}?",
        "Is it so that {s}?",
        "Is it right that {s}?",
        "Given the text, is it so that {s}?",
        "Going by the text, is it true that {s}?",
    ),
    "test": (
        "Given the text, does it follow that {s}?",
        "Going by the text, is it right that {s}?",
    ),
}

# More, less and most of a quality.
QUALITIES = (
    ("taller", "shorter", "tallest"),
    ("older", "younger", "oldest"),
    ("faster", "slower", "fastest"),
    ("heavier", "lighter", "heaviest"),
    ("stronger", "weaker", "strongest"),
)
ORDERS: Patterns = {
    "train": (
        "{a} is {more} than {b}.",
        "{b} is {less} than {a}.",
        "Compared with {b}, {a} is {more}.",
        "Of the two, {a} and {b}, {a} is the {more} one.",
        "Compared with {a}, {b} is the {less} one.",
    ),
    "test": ("Of {a} and {b}, {a} is {more}.", "{b} is the {less} one of {a} and {b}."),
}
JOBS = ("baker", "miller", "farmer", "teacher", "smith", "weaver", "fisher", "sailor", "painter")
OWNED = ("a dog", "a cat", "a horse", "a boat", "a garden", "a red door", "a lamp", "a cart")
TOWNS = ("Tarn", "Holm", "Wick", "Sand", "Fell", "Birk", "Marl", "Dale")
ALL: Patterns = {
    "train": (
        "All {job}s in {town} have {thing}.",
        "Every {job} in {town} has {thing}.",
        "If you are a {job} in {town}, you have {thing}.",
    ),
    "test": ("In {town}, every {job} has {thing}.", "In {town}, all {job}s have {thing}."),
}
NONE: Patterns = {
    "train": (
        "No {job} in {town} has {thing}.",
        "None of the {job}s in {town} has {thing}.",
        "If you are a {job} in {town}, you do not have {thing}.",
    ),
    "test": ("In {town}, no {job} has {thing}.", "In {town}, none of the {job}s has {thing}."),
}
SOME: Patterns = {
    "train": (
        "Some {job}s in {town} have {thing}.",
        "Some of the {job}s in {town} have {thing}.",
        "A few {job}s in {town} have {thing}.",
    ),
    "test": (
        "In {town}, some {job}s have {thing}.",
        "In {town}, a few of the {job}s have {thing}.",
    ),
}
IS_ONE = ("{a} is a {job} in {town}.", "{a} works as a {job} in {town}.")
GIFTS = ("book", "key", "lamp", "coin", "letter", "basket", "ring", "cup", "map", "knife")
GIVEN: Patterns = {
    "train": (
        "{a} gave the {thing} to {b}.",
        "{a} gave {b} the {thing}.",
        "{b} got the {thing} from {a}.",
        "{b} received the {thing} from {a}.",
        "{a} had the {thing} and handed it to {b}.",
    ),
    "test": ("{b} received from {a} the {thing}.", "{a} had the {thing} and gave it to {b}."),
}
DEEDS = (
    "baked bread", "fed the hens", "swept the yard", "lit the fire", "wrote a letter", "sang a song",
    "closed the gate", "fetched water", "read a book", "cut the grass", "washed the cups",
)  # fmt: skip
EVENTS: Patterns = {
    "train": (
        "{x} before {y}.",
        "{y} after {x}.",
        "First {x}, then {y}.",
        "{x}. After that, {y}.",
        "{y}. Before that, {x}.",
    ),
    "test": ("Before {y}, {x}.", "After {x}, {y}."),
}
ROOMS = ("mill", "barn", "kitchen", "garden", "school", "market", "tower", "shop", "church")
PLACED: Patterns = {
    "train": (
        "{a} and {b} are in the {here}. {c} is in the {there}.",
        "{a} is in the {here} with {b}. {c} is in the {there}.",
        "{c} is in the {there}. {a} and {b} are in the {here}.",
        "{a} is in the {here}. {c} is in the {there}. {b} is with {a}.",
    ),
    "test": (
        "In the {here} are {a} and {b}. In the {there} is {c}.",
        "{c} is in the {there}, and {a} is with {b} in the {here}.",
    ),
}


def orders(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell of 2 to 4 people in an order, or of two that one more exceeds, and ask who exceeds whom."""
    (more, less, most), other = rng.sample(QUALITIES, 2)
    people = rng.sample(names, rng.randint(2, 4))
    count, fork = len(people), len(people) == 3 and rng.random() < 0.4
    links = [(0, 1), (0, 2)] if fork else [(i, i + 1) for i in range(count - 1)]
    told = [
        rng.choice(ORDERS[split]).format(a=people[i], b=people[j], more=more, less=less)
        for i, j in links
    ]
    said: list[Statement] = []
    for i, a in enumerate(people):
        for b in people[i + 1 :]:
            known = not fork or i == 0
            told_of = [f"{a} is {more} than {b}", f"{b} is {less} than {a}"]
            denied = [f"{b} is {more} than {a}", f"{a} is {less} than {b}"]
            said += [(text, "yes" if known else "unknown") for text in told_of]
            said += [(text, "no" if known else "unknown") for text in denied]
            first, second = rng.sample((a, b), 2)
            said.append((f"{first} is {rng.choice(other[:2])} than {second}", "unknown"))
    stranger = rng.choice([n for n in names if n not in people])
    said.append((f"{people[-1]} is {more} than {stranger}", "unknown"))
    if count > 2:
        said += [(f"{a} is the {most} of them", _verdict(a == people[0])) for a in people[:2]]
    return _group(rng, split, shuffled(rng, told), said)


def quantities(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell what all, no or some of a town's bakers have, and ask what one of them has."""
    job, other_job = rng.sample(JOBS, 2)
    thing, other = rng.sample(OWNED, 2)
    town = rng.choice(TOWNS)
    a, b = rng.sample(names, 2)
    kind, patterns = rng.choice((("all", ALL), ("no", NONE), ("some", SOME)))
    told = [rng.choice(patterns[split]).format(job=job, town=town, thing=thing)]
    told += [rng.choice(IS_ONE).format(a=a, job=job, town=town)]
    if kind == "some" or rng.random() < 0.5:
        told += [rng.choice(IS_ONE).format(a=b, job=other_job, town=town)]
    one = {"all": "yes", "no": "no", "some": "unknown"}[kind]
    against = {"yes": "no", "no": "yes", "unknown": "unknown"}[one]
    said: list[Statement] = [
        (f"{a} has {thing}", one),
        (f"{a} does not have {thing}", against),
        (f"every {job} in {town} has {thing}", one),
        (f"no {job} in {town} has {thing}", "no" if kind == "some" else against),
        (f"at least one {job} in {town} has {thing}", "yes" if kind == "some" else one),
        (f"{b} has {thing}", "unknown"),
        (f"{a} has {other}", "unknown"),
        (f"every {job} in {town} has {other}", "unknown"),
        (f"{a} works in {town}", "yes"),
        (f"no {job} works in {town}", "no"),
    ]
    return _group(rng, split, told, said)


def gifts(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell of a thing given once or twice, and ask who gave, got and has it."""
    a, b, c, d = rng.sample(names, 4)
    thing, other = rng.sample(GIFTS, 2)
    people = [a, b, c] if rng.random() < 0.4 else [a, b]
    told, said = [], list[Statement]()
    for i, (giver, getter) in enumerate(pairwise(people)):
        text = rng.choice(GIVEN[split]).format(a=giver, b=getter, thing=thing)
        told.append(f"Later, {text}" if i else text)
        said += [
            (f"{giver} gave the {thing} to {getter}", "yes"),
            (f"{getter} got the {thing} from {giver}", "yes"),
            (f"{giver} received the {thing} from {getter}", "no"),
            (f"{getter} gave {giver} the {thing}", "no"),
        ]
    owner = people[-1]
    said += [(f"{person} has the {thing} now", _verdict(person == owner)) for person in people]
    said += [
        (f"{owner} has a {other}", "unknown"),
        (f"{a} gave {b} a {other}", "unknown"),
        (f"{a} likes {b}", "unknown"),
        (f"{d} has a {thing} too", "unknown"),
    ]
    extra = [items.chat(FAMILY, f"Who has the {thing} now?", owner)] if rng.random() < 0.3 else []
    return _group(rng, split, told, said, extra)


def events(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell of two deeds and which was first, and ask for their order."""
    a, b, c = rng.sample(names, 3)
    did, did_then, other = rng.sample(DEEDS, 3)
    x, y = f"{a} {did}", f"{b} {did_then}"
    said: list[Statement] = [
        (f"{x} before {y}", "yes"),
        (f"{y} after {x}", "yes"),
        (f"{y} before {x}", "no"),
        (f"{x} after {y}", "no"),
        (x, "yes"),
        (y, "yes"),
        (f"{a} {did} last", "no"),
        (f"{c} {other}", "unknown"),
        (f"{a} {other} later", "unknown"),
        (f"{b} saw {a} that day", "unknown"),
        (f"{c} {other} before {y}", "unknown"),
    ]
    return _group(rng, split, [rng.choice(EVENTS[split]).format(x=x, y=y)], said)


def places(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell where three people are, and ask who is where and with whom."""
    a, b, c, d = rng.sample(names, 4)
    here, there, other = rng.sample(ROOMS, 3)
    told = rng.choice(PLACED[split]).format(a=a, b=b, c=c, here=here, there=there)
    one, two = rng.sample((a, b), 2)
    said: list[Statement] = [
        (f"{one} is in the {here}", "yes"),
        (f"{a} and {b} are in the same place", "yes"),
        (f"{c} is in the {there}", "yes"),
        (f"{two} is in the {there}", "no"),
        (f"{one} and {c} are in the same place", "no"),
        (f"{c} is in the {here}", "no"),
        (f"{c} is with {two}", "no"),
        (f"{d} is in the {here}", "unknown"),
        (f"{d} is in the {other}", "unknown"),
        (f"{c} and {d} are in the same place", "unknown"),
        (f"{one} likes the {here}", "unknown"),
    ]
    return _group(rng, split, [told], said)


_Kind = Callable[[random.Random, Split, Sequence[str]], Group]
KINDS: tuple[_Kind, ...] = (orders, quantities, gifts, events, places)


def entailment(rng: random.Random, split: Split, names: Sequence[str]) -> Group:
    """Tell a few facts of any kind, and ask what follows from them."""
    return rng.choice(KINDS)(rng, split, names)


def _verdict(holds: bool) -> str:
    """Word what is known for sure."""
    return "yes" if holds else "no"


def _group(
    rng: random.Random,
    split: Split,
    told: Sequence[str],
    said: Sequence[Statement],
    extra: Sequence[Question] = (),
) -> Group:
    """Ask 3 to 5 questions: each form asks for each of its answers equally often."""
    left = shuffled(rng, list(dict(said)))
    verdicts = dict(said)
    questions = list(extra)
    count = rng.randint(3, 5)
    for _ in range(20):
        if len(questions) == count:
            break
        form = rng.choice(("predicate", "decide", "letter"))
        # A statement is true or not: unknown is no answer to it.
        wanted = rng.choice(VERDICTS[:2] if form == "predicate" else VERDICTS)
        text = next((s for s in left if verdicts[s] == wanted), None)
        if text is None:
            continue
        left.remove(text)
        if form == "predicate":
            questions.append(
                items.predicate(FAMILY, f"{text[0].upper()}{text[1:]}.", wanted == "yes")
            )
            continue
        asked = rng.choice(ASKED[split]).format(s=text)
        put = items.decide if form == "decide" else items.by_letter
        questions.append(put(FAMILY, asked, shuffled(rng, VERDICTS), wanted))
    return Group(" ".join(told) + "\n\n", tuple(questions))
