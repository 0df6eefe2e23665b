"""Statements about stories, true ones and false ones."""

from dataclasses import replace

from models.training.curriculum.items import Question, predicate
from models.training.curriculum.telling import Event, Teller

# What happened, in the fewest words; the kinds that are left out change nothing or name nobody.
CLAUSES = {
    "go": "{a} went to the {l}",
    "take": "{a} took the {t}",
    "drop": "{a} put the {t} down",
    "give": "{a} gave the {t} to {b}",
    "meet": "{a} met {b}",
    "buy": "{a} bought {n} {g}",
    "collect": "{a} found {n} {g}",
    "share": "{a} gave {n} of the {g} to {b}",
    "find": "{a} found the {t}",
    "make": "{a} made a {c} {t}",
    "mend": "{a} mended the {t}",
    "pay": "{a} paid {b} {n} coins",
    "hide": "{a} hid in the {l}",
    "caught": "{a} found {b} in the {l}",
    "both_go": "{a} and {b} went to the {l}",
    "rain": "it began to rain",
    "dry": "the rain stopped",
    "thank": "{a} thanked {b}",
    "first": "{a} came first",
    "last": "{a} came last",
}
# Kinds that are asked about as statements, with the role that a false one changes.
SWAPPED = {
    "go": "al", "take": "at", "give": "abt", "buy": "ang", "collect": "ang", "share": "n",
    "make": "act", "mend": "a", "pay": "n", "hide": "al", "caught": "bl", "first": "a", "last": "a",
    "both_go": "l",
}  # fmt: skip
STATES = {
    "train": (
        "{a} is in the {l} at the end",
        "At the end {a} is in the {l}",
        "{a} is now in the {l}",
    ),
    "test": ("At the end of the story {a} is in the {l}", "Now {a} is in the {l}"),
}
HOLDS = {
    "train": ("{a} has the {t} at the end", "At the end {a} has the {t}", "{a} has the {t} now"),
    "test": ("At the end of the story {a} has the {t}", "Now {a} has the {t}"),
}
JOBS = {"train": ("{a} was a {w}", "{a} worked as a {w}"), "test": ("{a} was the {w}",)}
COLOURS = {
    "train": ("The {t} was {c}", "The {t} had the colour {c}"),
    "test": ("The colour of the {t} was {c}",),
}


def clause(event: Event) -> str | None:
    """Word what happened, or None for what is not asked about."""
    known = CLAUSES.get(event.kind)
    return None if known is None else _filled(known, event)


def is_so(story: Teller) -> Question:
    """Ask whether something is so; half of what is asked is not."""
    rng, holds = story.rng, story.rng.random() < 0.5
    for _ in range(20):
        pattern, event, roles = _fact(story)
        role = rng.choice(roles)
        hint = str(getattr(event, role))
        if not holds:
            event = _changed(story, event, role)
            if _stated(story, pattern, event):
                continue
        said = _filled(pattern, event)
        said = said[0].upper() + said[1:]
        return replace(predicate("is it so", f"{said}.", holds, hint), about=event.a)
    return predicate("is it so", "Nobody is in this story.", False)


def _fact(story: Teller) -> tuple[str, Event, str]:
    """Something true: words, roles, and those of them that may be changed."""
    rng, facts = story.rng, []
    for event in story.events:
        if event.kind in SWAPPED:
            facts.append((CLAUSES[event.kind], event, SWAPPED[event.kind]))
        elif event.kind == "job":
            facts.append((rng.choice(JOBS[story.split]), event, "aw"))
    for name, place in story.state.place.items():
        facts.append((rng.choice(STATES[story.split]), Event("state", a=name, l=place), "l"))
    for thing, name in story.state.holder.items():
        facts.append((rng.choice(HOLDS[story.split]), Event("state", a=name, t=thing), "a"))
    for thing, colour in story.state.colour.items():
        if f" {colour} {thing}" in story.text:
            facts.append((rng.choice(COLOURS[story.split]), Event("state", t=thing, c=colour), "c"))
    return rng.choice(facts)


def _changed(story: Teller, event: Event, role: str) -> Event:
    """The event with another word in one role: of the same story, or of none."""
    rng, words = story.rng, story.words
    own = {getattr(e, role) for e in story.events}
    other = {
        "a": [p.name for p in words.cast(rng, 2)], "b": [p.name for p in words.cast(rng, 2)],
        "l": words.places, "t": words.things, "g": words.goods, "c": words.colours, "w": words.jobs,
        "n": range(1, 41),
    }[role]  # fmt: skip
    if role in "ab":
        own = set(story.people)
    if role == "w":
        own = set()
    taken = {event.a, event.b, getattr(event, role), "", 0}
    near = sorted(own - taken)
    far = [value for value in rng.sample(list(other), min(4, len(other))) if value not in taken]
    if not (near or far):  # both of the people drawn are in the event
        far = [p.name for p in words.cast(rng, 3) if p.name not in taken]
    value = rng.choice(near) if near and (rng.random() < 0.6 or not far) else rng.choice(far)
    return Event(**{**vars(event), role: value})


def _stated(story: Teller, pattern: str, event: Event) -> bool:
    """True if the changed event holds as well."""
    said = _filled(pattern, event)
    if event.kind == "go":
        return any(e.l == event.l and event.a in (e.a, e.b, e.d) for e in story.events)
    if event.kind != "state":
        return any(_filled(pattern, e) == said for e in story.events if e.kind == event.kind)
    return False


def _filled(pattern: str, event: Event) -> str:
    return pattern.format(**vars(event))
