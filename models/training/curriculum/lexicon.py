"""The words of the small world, by split: names, places, things, numbers."""

import functools
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.training.curriculum.items import Split

Gender = Literal["she", "he"]
_FILE = Path(__file__).with_name("lexicon.toml")
# A name in so many is made up, of two syllables that other names share: copying must not depend on
# knowing a name.
MADE_UP_SHARE = 0.5
# Of names that are spelled anew, so many begin as words do.
KNOWN_BEGIN_SHARE = 0.6
# Of a training row's names, so many are spelled anew: only what copies by place can say them.
SPELLED_SHARE = 0.6
SHARED = ("colours", "jobs", "animals", "skies", "parts", "feelings")


@dataclass(frozen=True)
class Person:
    """A name, and the pronoun that stands for it."""

    name: str
    gender: Gender


@dataclass(frozen=True)
class Lexicon:
    """The words that rows of one split are made of.

    The words of ``animals``, ``colours``, ``jobs`` and the like are in both splits: a model cannot
    know the meaning of a word that it never saw.
    """

    split: Split
    people: tuple[Person, ...]
    places: tuple[str, ...]
    things: tuple[str, ...]
    goods: tuple[str, ...]
    numbers: tuple[int, ...]
    colours: tuple[str, ...]
    jobs: tuple[str, ...]
    animals: tuple[str, ...]
    skies: tuple[str, ...]
    parts: tuple[str, ...]
    feelings: tuple[str, ...]
    spelled_share: float = 0.0

    def cast(self, rng: random.Random, count: int) -> list[Person]:
        """Draw people whose names do not begin alike."""
        drawn: list[Person] = []
        while len(drawn) < count:
            anew = self.spelled_share > 0 and rng.random() < self.spelled_share
            person = spelled(rng) if anew else rng.choice(self.people)
            if all(person.name[:2] != other.name[:2] for other in drawn):
                drawn.append(person)
        return drawn


def spelled(rng: random.Random) -> Person:
    """Make a name up, of one to three syllables, that the test split does not have."""
    while True:
        genus: Gender = rng.choice(("she", "he"))
        known_begin = rng.random() < KNOWN_BEGIN_SHARE
        name = (_with_known_begin if known_begin else _of_open_syllables)(rng, genus)
        if 3 <= len(name) <= 9 and name not in held_out_words():
            return Person(name, genus)


def _of_open_syllables(rng: random.Random, genus: Gender) -> str:
    """Spell a name whose syllables end in vowels."""
    parts = _raw()["spelled"]
    name = rng.choice(parts["begins"]) + rng.choice(parts["vowels"])
    for _ in range(rng.choice((0, 1, 1, 2))):
        name += rng.choice(parts["middles"]) + rng.choice(parts["vowels"])
    if genus == "she":
        name += rng.choice(parts["middles"])
    return str(name + rng.choice(parts["male" if genus == "he" else "female"])).capitalize()


def _with_known_begin(rng: random.Random, genus: Gender) -> str:
    """Spell a name that begins as words do: often with one token, of which there are many."""
    parts, ends = _raw()["spelled"], "male" if genus == "he" else "female"
    name = rng.choice(parts["known_begins"])
    if rng.random() < 0.3:
        name += rng.choice("aeiou") + rng.choice(parts["middles"])
    end = rng.choice((*parts[ends], *_raw()["made_up"][ends]))
    if name[-1] not in "aeiou" and end[0] not in "aeiouy":
        name += rng.choice("aeiou")
    return str(name + end).capitalize()


def is_spelled(name: str) -> bool:
    """True if a training row's name is no name of the lexicon, but was made up for the row."""
    return name not in _known_names()


@functools.cache
def _known_names() -> frozenset[str]:
    return frozenset(p.name for split in ("train", "test") for p in lexicon(split).people)


@functools.cache
def _raw() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


@functools.cache
def lexicon(split: Split) -> Lexicon:
    """Read the words of a split; those of ``test`` are in part the training split's."""
    raw = _raw()
    own = ("train",) if split == "train" else ("train", "test")
    words: dict[str, list[str]] = raw["words"]
    held_out = set(raw["numbers"]["test"])
    numbers = [
        n for n in range(2, raw["numbers"]["most"] + 1) if (n in held_out) == (split == "test")
    ]
    shared = {kind: tuple(words[kind]) for kind in SHARED}
    growing = {
        kind: tuple(word for part in own for word in raw[kind][part])
        for kind in ("places", "things", "goods")
    }
    people = tuple(_people(raw, split))
    share = SPELLED_SHARE if split == "train" else 0.0
    return Lexicon(
        split=split, people=people, numbers=tuple(numbers), spelled_share=share, **growing, **shared
    )


@functools.cache
def held_out_words() -> frozenset[str]:
    """Names, places and things that no row of the training split has."""
    train, test = lexicon("train"), lexicon("test")
    names = {p.name for p in test.people} - {p.name for p in train.people}
    return frozenset(
        names.union(
            *(
                {*test.places} - {*train.places},
                {*test.things} - {*train.things},
                {*test.goods} - {*train.goods},
            )
        )
    )


def _people(raw: dict[str, Any], split: Split) -> list[Person]:
    known = raw["people"]
    prefix = "" if split == "train" else "test_"
    real = [Person(name, "she") for name in known[f"{prefix}female"]]
    real += [Person(name, "he") for name in known[f"{prefix}male"]]
    made_up = []
    for row, begin in enumerate(raw["made_up"]["begins"]):
        for genus, ends in (("she", raw["made_up"]["female"]), ("he", raw["made_up"]["male"])):
            for column, end in enumerate(ends):
                # A diagonal of the table is held out: every syllable is seen, these pairs are not.
                if ((row + column) % 5 == 0) == (split == "test"):
                    made_up.append(Person(begin + end, genus))  # type: ignore[arg-type]
    taken = {p for kind in ("female", "male", "test_female", "test_male") for p in known[kind]}
    made_up = [person for person in made_up if person.name not in taken]
    repeats = round(len(made_up) * (1 - MADE_UP_SHARE) / MADE_UP_SHARE / len(real))
    return real * repeats + made_up
