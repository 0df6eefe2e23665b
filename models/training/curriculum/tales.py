"""Stories to be told and continued."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace

from models.training.curriculum.items import Group, Mention, Question, Split
from models.training.curriculum.lexicon import lexicon, spelled
from models.training.curriculum.stories import story
from models.training.curriculum.telling import Event, State, Teller

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

# Of the people whom the wish or the start of a story names.
SPELLED_IN_STARTS = 0.75
# What happens only between people in one place.
NEEDS_BOTH = ("give", "share", "thank", "pay", "ask")


def continued(rng: random.Random, split: Split) -> Group:
    """Ask for the rest of a story."""
    told = _of_known_people(rng, split)
    count = _first_sentences(rng, told)
    _rename(rng, told, " ".join(told.sentences[:count]))
    return _asked_for(asked(rng, split, " ".join(told.sentences[:count])), told, count)


def asked(rng: random.Random, split: Split, start: str) -> str:
    """Word the wish for the rest of a story."""
    return f"{rng.choice(CONTINUE[split])}\n\n{start}"


def parted(rng: random.Random, told: Teller) -> tuple[str, str]:
    """Part a story behind its first sentences: at least two, at most two thirds."""
    count = _first_sentences(rng, told)
    return " ".join(told.sentences[:count]), " ".join(told.sentences[count:])


def _first_sentences(rng: random.Random, told: Teller) -> int:
    return rng.randint(2, max(2, 2 * len(told.sentences) // 3))


def requested(rng: random.Random, split: Split) -> Group:
    """Ask for a story about some of its people and things."""
    told = _of_known_people(rng, split)
    names = list(told.people)
    count = 1 if rng.random() < 0.5 or len(names) == 1 else 2
    _rename(rng, told, " ".join(names[:count]))
    who = " and ".join(list(told.people)[:count])
    coloured = [(t, c) for t, c in told.state.colour.items() if f" {c} {t}" in told.text]
    if coloured and rng.random() < 0.6:
        thing, colour = coloured[0]
        who = f"{who} and a {colour} {thing}"
    return _asked_for(rng.choice(TELL[split]).format(who=who), told, 0)


def plain(rng: random.Random, split: Split) -> Group:
    """Tell a story as plain text, without a turn around it."""
    told = _of_known_people(rng, split)
    return Group("", (Question("plain story", "text", told.text, ""),))


def _of_known_people(rng: random.Random, split: Split) -> Teller:
    return story(rng, split, replace(lexicon(split), spelled_share=0.0))


def _rename(rng: random.Random, told: Teller, start: str) -> None:
    """Make names up for people whom ``start`` names: they can only be copied.

    A model that learns to invent names for people of a story invents parts of all names.
    """
    names: dict[str, str] = {}
    for name, person in told.people.items():
        if told.split == "train" and name in start and rng.random() < SPELLED_IN_STARTS:
            others = {*told.people, *names.values()}
            while (new := spelled(rng)).gender != person.gender or any(
                new.name[:2] == other[:2] for other in others
            ):
                pass
            names[name] = new.name
    if names:
        told.rename(names)


def _asked_for(wish: str, told: Teller, first: int) -> Group:
    """Ask for the sentences from index ``first`` on."""
    family = "continue" if first else "tell"
    rest = " ".join(told.sentences[first:])
    question = Question(family, "chat", wish, rest, mentions=tuple(_mentions(told, first)))
    return Group("", (question,))


def _mentions(told: Teller, first: int) -> Iterator[Mention]:
    """Find people, places and things in the sentences from index ``first`` on."""
    state, begin = State(), 0
    for index, (sentence, event) in enumerate(zip(told.sentences, told.events, strict=True)):
        if index >= first:
            for start, role, word in _roles(sentence, event):
                unlike = _impossible(sentence[:start], role, event, state)
                yield Mention(begin + start, word, unlike)
            begin += len(sentence) + 1
        state.apply(event)


def _roles(sentence: str, event: Event) -> list[tuple[int, str, str]]:
    """Find where a sentence names what, with the role that it has there."""
    values = ((role, getattr(event, role)) for role in "abdlt")
    found = ((re.search(rf"\b{word}\b", sentence), role, word) for role, word in values if word)
    return sorted((match.start(), role, word) for match, role, word in found if match)


def _impossible(before: str, role: str, event: Event, state: State) -> tuple[str, ...]:
    """List what cannot stand where ``event`` has a role: people twice, far from each other, on the spot."""
    if role == "l":
        here = state.place.get(event.a, "") if event.kind in ("go", "both_go") else ""
        return (here,) if here else ()
    if role == "t":
        return ()
    people = [name for name in (event.a, event.b, event.d) if name]
    twice = [name for name in people if name != getattr(event, role) and name in before]
    if role != "b" or event.kind not in NEEDS_BOTH or event.a not in state.place:
        return tuple(twice)
    here = state.place[event.a]
    return tuple(dict.fromkeys([*twice, *(n for n, at in state.place.items() if at != here)]))
