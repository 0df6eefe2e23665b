"""Sentences of the small world, and what they change: who is where and has what."""

import functools
import random
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from models.training.curriculum.items import Split
from models.training.curriculum.lexicon import Lexicon, Person, lexicon

_FILE = Path(__file__).with_name("patterns.toml")
PRONOUN_SHARE, TEST_PATTERN_SHARE = 0.4, 0.5
_FORMS = {"she": ("she", "her", "her"), "he": ("he", "his", "him")}
# "the birthday of {a}" cannot become "the birthday of she".
_OBJECT = re.compile(r"\b(of|for|from|made|knew|to) \{a\}")


@dataclass(frozen=True)
class Event:
    """Something that happened; the roles are those of ``patterns.toml``, empty where it has none."""

    kind: str
    a: str = ""
    b: str = ""
    d: str = ""
    l: str = ""  # noqa: E741 (the placeholder's name)
    t: str = ""
    c: str = ""
    n: int = 0
    g: str = ""
    w: str = ""
    part: str = ""


@dataclass
class State:
    """The state of the small world after some events.

    Attributes:
        place: of each person, where known.
        holder: of each thing that somebody has.
        lies: place of each thing that nobody has, where known.
        count: of goods, by person and kind.
        colour: of each thing.
    """

    place: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    lies: dict[str, str] = field(default_factory=dict)
    count: dict[tuple[str, str], int] = field(default_factory=dict)
    colour: dict[str, str] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Change what the event changes."""
        a, b, place, thing = event.a, event.b, event.l, event.t
        if event.kind in _MOVES_A:
            self.place[a] = place
        if event.kind in _MOVES_B:
            self.place[b] = place
        if event.kind == "race":
            self.place[event.d] = place
        if event.kind == "meet" and a in self.place:
            self.place[b] = self.place[a]
        if event.kind in _GETS:
            self._hand(thing, a)
        elif event.kind == "give":
            self._hand(thing, b)
        elif event.kind in ("drop", "missing"):
            self.holder.pop(thing, None)
            if event.kind == "drop" and a in self.place:
                self.lies[thing] = self.place[a]
        elif event.kind == "lies":
            self.lies[thing] = place
        if event.c:
            self.colour[thing] = event.c
        self._apply_goods(event)

    def _apply_goods(self, event: Event) -> None:
        mine, theirs = (event.a, event.g), (event.b, event.g)
        if event.kind in ("buy", "collect"):
            self.count[mine] = self.count.get(mine, 0) + event.n
        elif event.kind in ("share", "use"):
            self.count[mine] = self.count.get(mine, 0) - event.n
            if event.kind == "share":
                self.count[theirs] = self.count.get(theirs, 0) + event.n

    def _hand(self, thing: str, person: str) -> None:
        self.holder[thing] = person
        self.lies.pop(thing, None)


_MOVES_A = {
    "at",
    "go",
    "hide",
    "caught",
    "together",
    "both_go",
    "morning",
    "noon",
    "evening",
    "race",
}
_MOVES_B = {"caught", "together", "both_go", "race"}
_GETS = {"own", "take", "find", "make", "prize"}


@functools.cache
def patterns() -> dict[str, dict[str, list[str]]]:
    """Read the sentences of each kind of event, by split."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


class Teller:
    """Tells events one after the other, each as a sentence.

    Attributes:
        sentences: told so far.
        events: one for each sentence.
        people: by name, everybody who was named.
    """

    def __init__(self, rng: random.Random, split: Split, words: Lexicon | None = None) -> None:
        self.rng, self.split = rng, split
        self.words: Lexicon = words or lexicon(split)
        self.sentences: list[str] = []
        self.events: list[Event] = []
        self.state = State()
        self.people: dict[str, Person] = {}

    def tell(
        self,
        kind: str,
        a: Person | None = None,
        b: Person | None = None,
        d: Person | None = None,
        **roles: str | int,
    ) -> None:
        """Tell one event; a pronoun may stand for the actor of the sentence before."""
        for person in (a, b, d):
            if person is not None:
                self.people[person.name] = person
        event = Event(kind, *(p.name if p else "" for p in (a, b, d)), **roles)  # type: ignore[arg-type]
        pattern = self._pattern(kind, event)
        actor = event.a
        if (
            a is not None
            and self._may_stand(pattern, a, event)
            and self.rng.random() < PRONOUN_SHARE
        ):
            actor = a.gender.capitalize() if pattern.startswith("{a}") else a.gender
        self.sentences.append(filled(pattern, event, a, actor))
        self.events.append(event)
        self.state.apply(event)

    def _pattern(self, kind: str, event: Event) -> str:
        known = patterns()[kind]
        of_test = self.split == "test" and self.rng.random() < TEST_PATTERN_SHARE
        choices = known["test"] if of_test else known["train"]
        fitting = [p for p in choices if "{c}" not in p or event.c]
        return self.rng.choice(fitting or known["train"])

    def _may_stand(self, pattern: str, a: Person, event: Event) -> bool:
        if not self.events or self.events[-1].a != a.name or _OBJECT.search(pattern):
            return False
        before = self.events[-1]
        named = [n for n in (before.b, before.d, event.b, event.d) if n]
        return all(self.people[name].gender != a.gender for name in named)

    def rename(self, names: dict[str, str]) -> None:
        """Give people other names, as if they had had them from the beginning."""
        old = re.compile(rf"\b({'|'.join(names)})\b")
        self.sentences = [old.sub(lambda m: names[m.group()], text) for text in self.sentences]
        self.events = [
            replace(e, **{role: names.get(getattr(e, role), getattr(e, role)) for role in "abd"})
            for e in self.events
        ]
        self.people = {
            names.get(name, name): Person(names.get(name, name), person.gender)
            for name, person in self.people.items()
        }
        self.state = State()
        for event in self.events:
            self.state.apply(event)

    @property
    def text(self) -> str:
        """Everything told so far."""
        return " ".join(self.sentences)


def filled(pattern: str, event: Event, a: Person | None, actor: str) -> str:
    """Fill a pattern with an event's roles."""
    he, his, him = _FORMS[a.gender if a else "he"]
    return pattern.format(
        a=actor, b=event.b, d=event.d, l=event.l, t=event.t, c=event.c, n=event.n, g=event.g,
        w=event.w, part=event.part, he=he, his=his, him=him,
    )  # fmt: skip
