"""Questions about stories, with their answers read off what happened."""

import functools
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from models.training.curriculum import items
from models.training.curriculum.items import Form, Group, Question, mentions_of, shuffled
from models.training.curriculum.lexicon import is_spelled
from models.training.curriculum.statements import clause, is_so
from models.training.curriculum.telling import Teller

_FILE = Path(__file__).with_name("questions.toml")
MOST_LABELS, STORY_WEIGHT = 10, 0.15
FORMS: tuple[Form, ...] = ("chat", "decide", "letter")
DAY_PARTS = {"morning": "in the morning", "noon": "at noon", "evening": "in the evening"}


@dataclass(frozen=True)
class Asked:
    """A question in words, before its form is chosen.

    Attributes:
        family: the skill that it asks for.
        words: the question.
        answer: as a label.
        others: labels that are wrong.
        spoken: the answer as a free one; empty: the label.
    """

    family: str
    words: str
    answer: str
    others: Sequence[str] = field(default_factory=tuple)
    spoken: str = ""


@functools.cache
def wordings() -> dict[str, dict[str, list[str]]]:
    """Read the questions' words, by what they ask for and by split."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def asked_about(story: Teller) -> Group:
    """Make a group of some questions about one story, in all forms."""
    rng = story.rng
    asked = list(all_about(story))
    rng.shuffle(asked)
    # Of what is asked often, less: each family has its turn first.
    families = shuffled(rng, list(dict.fromkeys(a.family for a in asked)))
    first = [next(a for a in asked if a.family == family) for family in families]
    chosen = (first + [a for a in asked if a not in first])[: rng.randint(3, 5)]
    questions = [_told_where(put(rng, a), story, a) for a in chosen]
    questions += [is_so(story) for _ in range(rng.randint(1, 3))]
    different = list({question.tail: question for question in questions}.values())
    rng.shuffle(different)
    # Who a story is about cannot be foreseen, least of all a name that was made up for it.
    weight = 0.0 if any(map(is_spelled, story.people)) else STORY_WEIGHT
    return Group(f"{story.text}\n\n", tuple(different), weight, told_of(story))


def _told_where(question: Question, story: Teller, asked: Asked) -> Question:
    """Add whom a question names, and the word that its answer follows from or says."""
    question = replace(question, about=about(story, asked.words))
    if not _one_word(asked):
        return question
    again = question.form in ("chat", "decide") and asked.answer in question.answer
    mentions = mentions_of(question.answer, [asked.answer]) if again else ()
    return replace(question, hint=asked.answer, mentions=mentions)


def told_of(story: Teller) -> tuple[tuple[int, str], ...]:
    """Find where the last word of each sentence ends, and the person whom the sentence is about."""
    return items.subjects_of(story.sentences, [event.a for event in story.events])


def _one_word(asked: Asked) -> bool:
    return asked.family in ("who", "where", "what", "when", "how many")


def about(story: Teller, words: str) -> str:
    """Find the person whom a question names first, if any."""
    named = [name for name in story.people if name in words]
    return min(named, key=words.index, default="")


def put(rng: random.Random, asked: Asked, form: Form | None = None) -> Question:
    """Put a question in a form: free, by label, by letter."""
    form = form or rng.choices(FORMS, (3, 3, 6))[0]
    if form == "chat":
        return items.chat(asked.family, asked.words, asked.spoken or asked.answer)
    others = list(dict.fromkeys(o for o in asked.others if o != asked.answer))
    count = min(len(others), rng.randint(2, MOST_LABELS) - 1) if len(others) > 1 else len(others)
    labels = shuffled(rng, [asked.answer, *others[:count]])
    make = items.decide if form == "decide" else items.by_letter
    return make(asked.family, asked.words, labels, asked.answer)


def all_about(story: Teller) -> Iterator[Asked]:
    """Word every question that the story answers, in no form yet."""
    for make in (_where, _things, _goods, _people, _attributes, _order):
        yield from make(story)


def _words(story: Teller, key: str, **roles: str | int) -> str:
    known = wordings()[key]
    choices = known["test"] if story.split == "test" else known["train"]
    a = story.people.get(str(roles.get("a", "")))
    return story.rng.choice(choices).format(**roles, he=a.gender if a else "he")


def _names(story: Teller) -> list[str]:
    """The people of a story, then others, for wrong answers."""
    own = shuffled(story.rng, list(story.people))
    return own + [p.name for p in story.words.cast(story.rng, 9)]


def _place_names(story: Teller) -> list[str]:
    own = shuffled(story.rng, sorted({e.l for e in story.events if e.l}))
    return own + story.rng.sample(story.words.places, 9)


def _where(story: Teller) -> Iterator[Asked]:
    others = _place_names(story)
    for name, place in story.state.place.items():
        words = _words(story, "where", a=name)
        yield Asked("where", words, place, others, f"In the {place}.")
    before: dict[str, list[str]] = {}
    for event, place in _trail(story):
        before.setdefault(event, []).append(place)
    for name, trail in before.items():
        for start, goal in pairwise(trail):
            if trail.count(goal) == 1:
                words = _words(story, "where_before", a=name, l=goal)
                yield Asked("where", words, start, others, f"In the {start}.")
    for thing, place in story.state.lies.items():
        words = _words(story, "where_thing", t=thing)
        yield Asked("where", words, place, others, f"In the {place}.")


def _trail(story: Teller) -> Iterator[tuple[str, str]]:
    """Each person's places in their order."""
    for event in story.events:
        if event.l and event.a and event.kind in ("at", "go", "hide", "together", "both_go"):
            yield event.a, event.l
            if event.b and event.kind in ("together", "both_go"):
                yield event.b, event.l


def _things(story: Teller) -> Iterator[Asked]:
    names = _names(story)
    things = shuffled(story.rng, sorted({e.t for e in story.events if e.t}))
    things += story.rng.sample(story.words.things, 9)
    for thing, name in story.state.holder.items():
        yield Asked("who", _words(story, "who_has", t=thing), name, names, f"It is {name}.")
    gifts = [e for e in story.events if e.kind == "give"]
    for event in gifts:
        if sum(e.t == event.t and e.b == event.b for e in gifts) == 1:
            words = _words(story, "who_gave", t=event.t, b=event.b)
            yield Asked("who", words, event.a, names, f"It was {event.a}.")
        if sum(e.t == event.t and e.a == event.a for e in gifts) == 1:
            words = _words(story, "who_got", t=event.t, a=event.a)
            yield Asked("who", words, event.b, names, f"It was {event.b}.")
        if sum(e.a == event.a and e.b == event.b for e in gifts) == 1:
            words = _words(story, "what_given", a=event.a, b=event.b)
            yield Asked("what", words, event.t, things, f"The {event.t}.")
    for kind, key in (("make", "what_made"), ("missing", "what_lost")):
        for event in story.events:
            if event.kind == kind:
                spoken = f"The {event.t}." if kind == "missing" else f"A {event.c} {event.t}."
                yield Asked("what", _words(story, key, a=event.a), event.t, things, spoken)


def _goods(story: Teller) -> Iterator[Asked]:
    for event in story.events:
        if event.kind in ("buy", "collect"):
            others = _numbers(story, event.n)
            words = _words(story, "how_many_got", a=event.a, g=event.g)
            yield Asked("how many", words, str(event.n), others)
            words = _words(story, "who_goods", n=event.n, g=event.g)
            yield Asked("who", words, event.a, _names(story), f"It was {event.a}.")
        elif event.kind == "share":
            words = _words(story, "how_many_given", a=event.a, b=event.b, g=event.g)
            yield Asked("how many", words, str(event.n), _numbers(story, event.n))
        elif event.kind == "pay":
            words = _words(story, "how_many_coins", a=event.a, b=event.b)
            yield Asked("how many", words, str(event.n), _numbers(story, event.n))
    for (name, goods), count in story.state.count.items():
        used = sum(e.n for e in story.events if (e.a, e.g) == (name, goods) and e.kind in _USES)
        words = _words(story, "how_many_left", a=name, g=goods)
        # What is left is worked out: the free answer says how.
        spoken = f"{count + used} - {used} = {count}" if used else ""
        yield Asked("how many", words, str(count), _numbers(story, count), spoken)


_USES = ("share", "use")


def _numbers(story: Teller, right: int) -> list[str]:
    own = [str(e.n) for e in story.events if e.n and e.n != right]
    near = [str(right + d) for d in story.rng.sample(range(1, 8), 2)]
    return own + near + [str(n) for n in story.rng.sample(range(1, 41), 6)]


def _people(story: Teller) -> Iterator[Asked]:
    names = _names(story)
    keys = {"first": "who_first", "last": "who_last", "job": "who_job", "hide": "who_hid",
            "own": "who_owner", "birthday": "who_birthday"}  # fmt: skip
    for event in story.events:
        if (key := keys.get(event.kind)) is not None:
            roles = {"l": event.l, "w": event.w, "c": event.c, "t": event.t}
            yield Asked("who", _words(story, key, **roles), event.a, names, f"It was {event.a}.")


def _attributes(story: Teller) -> Iterator[Asked]:
    words, told = story.words, story.text
    for thing, colour in story.state.colour.items():
        if f" {colour} {thing}" in told:
            yield Asked(
                "what", _words(story, "colour", t=thing), colour, _some(story, words.colours)
            )
    for event in story.events:
        if event.kind == "job":
            yield Asked("what", _words(story, "job", a=event.a), event.w, _some(story, words.jobs))
        elif event.kind == "saw":
            asked = _words(story, "what_saw", a=event.a)
            yield Asked("what", asked, event.w, _some(story, words.animals), f"A {event.w}.")
        elif event.kind == "scene":
            yield Asked("what", _words(story, "sky"), event.w, _some(story, words.skies))
        elif event.kind in DAY_PARTS:
            asked, spoken = _words(story, "when", a=event.a, l=event.l), DAY_PARTS[event.kind]
            others = shuffled(story.rng, [*DAY_PARTS])
            yield Asked("when", asked, event.kind, others, f"{spoken.capitalize()}.")
    felt = {e.a: e.w for e in story.events if e.kind == "feel"}
    for name, feeling in felt.items():
        if sum(e.kind == "feel" and e.a == name for e in story.events) == 1:
            asked = _words(story, "feel", a=name)
            yield Asked("what", asked, feeling, _some(story, words.feelings))


def _some(story: Teller, values: Sequence[str]) -> list[str]:
    return shuffled(story.rng, values)


def _order(story: Teller) -> Iterator[Asked]:
    """Ask for the next thing that happened, and for the earlier of two."""
    told = [(i, e, c) for i, e in enumerate(story.events) if (c := clause(e)) is not None]
    clauses = [c for _, _, c in told]
    once = [(i, e, c) for i, e, c in told if clauses.count(c) == 1]
    for (i, event, said), (j, after, then) in pairwise(once):
        others = shuffled(story.rng, [c for _, _, c in once if c not in (said, then)])
        if j == i + 1 and len(others) > 1:
            words = _words(story, "what_next", x=said)
            yield Asked("what then", words, then, others, f"{then}.")
            if event.kind == "go" and after.a == event.a:
                words = _words(story, "what_then", a=event.a, l=event.l)
                yield Asked("what then", words, then, others, f"{then}.")
    if len(once) >= 3:
        (i, _, said), (j, _, other) = story.rng.sample(once, 2)
        words = _words(story, "before_after", x=said, y=other)
        yield Asked("before or after", words, "before" if i < j else "after", ("before", "after"))
