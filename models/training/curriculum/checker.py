"""A reader of the small world's sentences: is a continuation consistent with its story?

Every sentence is read back by the patterns that stories are told with. Faults are unreadable
sentences, people who were never introduced, and people or things in the wrong place.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from models.training.curriculum.lexicon import lexicon
from models.training.curriculum.telling import Event, State, patterns

FaultKind = Literal["unreadable", "name", "place", "thing", "number"]
# Kinds that may name somebody for the first time, with the roles that they introduce.
_INTRODUCES = {
    "meet": "b", "at": "a", "together": "ab", "own": "a", "job": "a", "wish": "a",
    "race": "bd", "game": "bd", "morning": "a", "birthday": "a",
}  # fmt: skip
_PRONOUNS = ("She", "she", "He", "he")


@dataclass(frozen=True)
class Fault:
    """One sentence that does not fit, and why."""

    kind: FaultKind
    sentence: str


@dataclass
class Reading:
    """Everything read so far.

    Attributes:
        state: after the sentences read.
        people: everybody named.
        actor: of the last sentence that had one.
        faults: found so far.
    """

    state: State = field(default_factory=State)
    people: set[str] = field(default_factory=set)
    things: set[str] = field(default_factory=set)
    hidden: dict[str, str] = field(default_factory=dict)
    actor: str = ""
    faults: list[Fault] = field(default_factory=list)


def faults(start: str, rest: str) -> list[Fault]:
    """Find what in ``rest`` contradicts ``start`` or itself.

    Raises:
        ValueError: ``start`` cannot be read, so that nothing can be said about ``rest``.
    """
    reading = Reading()
    for sentence, event in _read(start, reading):
        if event is None:
            raise ValueError(f"cannot read {sentence!r}")
        _accept(reading, event)
    reading.faults.clear()
    for sentence, event in _read(rest, reading):
        if event is None:
            reading.faults.append(Fault("unreadable", sentence))
            continue
        kind = _contradiction(reading, event)
        if kind is not None:
            reading.faults.append(Fault(kind, sentence))
        _accept(reading, event)
    return reading.faults


def _read(text: str, reading: Reading) -> Iterator[tuple[str, Event | None]]:
    """Cut a text into sentences that some pattern fits, the longest first."""
    rest = text.strip()
    while rest:
        fits = [m for kind, regex in _regexes() if (m := regex.match(rest)) is not None]
        kinds = [kind for kind, regex in _regexes() if regex.match(rest) is not None]
        if not fits:
            cut = re.search(r"[.!?]\"?(\s|$)", rest)
            end = cut.end() if cut else len(rest)
            yield rest[:end].strip(), None
        else:
            longest = max(range(len(fits)), key=lambda i: fits[i].end())
            end = fits[longest].end()
            yield rest[:end].strip(), _event(kinds[longest], fits[longest], reading)
        rest = rest[end:].strip()


def _event(kind: str, found: re.Match[str], reading: Reading) -> Event:
    roles = {name: value for name, value in found.groupdict().items() if value is not None}
    roles.pop("pronoun", None)
    if roles.get("a") in _PRONOUNS:
        roles["a"] = reading.actor
    number = int(roles.pop("n", 0))
    return Event(kind, n=number, **roles)


def _accept(reading: Reading, event: Event) -> None:
    reading.state.apply(event)
    reading.people |= {name for name in (event.a, event.b, event.d) if name}
    if event.t:
        reading.things.add(event.t)
    if event.kind == "hide":
        reading.hidden[event.a] = event.l
    reading.actor = event.a or reading.actor


def _contradiction(reading: Reading, event: Event) -> FaultKind | None:
    """Say what in a readable sentence does not fit what was read before."""
    state, introduced = reading.state, _INTRODUCES.get(event.kind, "")
    for role in "abd":
        name = getattr(event, role)
        if name and name not in reading.people and role not in introduced:
            return "name"
    people = [name for name in (event.a, event.b, event.d) if name]
    if len(set(people)) < len(people):
        return "name"
    if event.kind in ("give", "share", "thank", "pay", "ask") and _apart(state, event.a, event.b):
        return "place"
    if event.kind in ("go", "both_go") and state.place.get(event.a) == event.l:
        return "place"
    if event.kind == "caught" and reading.hidden.get(event.b, event.l) != event.l:
        return "place"
    if event.kind == "find" and event.t in state.holder:
        return "thing"
    if event.kind in ("give", "drop") and state.holder.get(event.t) != event.a:
        return "thing"
    if event.kind == "take" and state.lies.get(event.t) != state.place.get(event.a):
        return "thing"
    if event.kind in ("share", "use") and state.count.get((event.a, event.g), 0) < event.n:
        return "number"
    return None


def _apart(state: State, a: str, b: str) -> bool:
    here, there = state.place.get(a), state.place.get(b)
    return here is not None and there is not None and here != there


@functools.cache
def _regexes() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Make an expression of each pattern, with the roles as groups."""
    words = lexicon("test")
    name = r"[A-Z][a-z]+"
    lists = {
        "l": words.places, "t": words.things, "g": words.goods, "c": words.colours,
        "part": words.parts,
    }  # fmt: skip
    free = {"scene": words.skies, "job": words.jobs, "feel": words.feelings, "saw": words.animals}
    made = []
    for kind, both in patterns().items():
        groups = {role: _any_of(role, values) for role, values in lists.items()}
        groups["w"] = _any_of("w", free.get(kind, ()))
        groups |= {"n": r"(?P<n>\d+)", "b": f"(?P<b>{name})", "d": f"(?P<d>{name})"}
        groups["a"] = f"(?P<a>{name}|she|he)"
        groups |= {"he": "(?:she|he)", "his": "(?:her|his)", "him": "(?:her|him)"}
        for pattern in (*both["train"], *both["test"]):
            parts = re.split(r"(\{\w+\})", pattern)
            seen: set[str] = set()
            body = "".join(_group(part, groups, seen) for part in parts)
            made.append((kind, re.compile(body + r"(?=\s|$)")))
    return tuple(made)


def _group(part: str, groups: dict[str, str], seen: set[str]) -> str:
    if not part.startswith("{"):
        return re.escape(part)
    role = part.strip("{}")
    if role in seen and role not in ("he", "his", "him"):
        return f"(?P={role})"
    seen.add(role)
    return groups[role]


def _any_of(role: str, values: tuple[str, ...]) -> str:
    return f"(?P<{role}>{'|'.join(map(re.escape, values)) or '(?!)'})"
