"""Stories of 5 to 15 sentences: a dozen plots, told with people, places and things of a split."""

import random
from collections.abc import Callable

from models.training.curriculum.items import Split
from models.training.curriculum.lexicon import Lexicon, Person, lexicon
from models.training.curriculum.telling import Teller

MOST_SENTENCES = 15


def story(rng: random.Random, split: Split, words: Lexicon | None = None) -> Teller:
    """Tell one story, of a plot drawn at random, with the words of its split unless others are given."""
    while True:
        teller = Teller(rng, split, words)
        if rng.random() < 0.5:
            _scene(teller)
        rng.choice(PLOTS)(teller)
        if rng.random() < 0.3:
            teller.tell("end")
        if 5 <= len(teller.sentences) <= MOST_SENTENCES:
            return teller


def snippet(rng: random.Random, split: Split, people: list[Person]) -> Teller:
    """Tell a few sentences about one or two people, as a document to be searched."""
    teller = Teller(rng, split)
    a, b = people
    rng.choice(SNIPPETS)(teller, a, b)
    _aside(teller, a)
    return teller


def short_story(rng: random.Random, split: Split) -> Teller:
    """Tell a few sentences about two people."""
    return snippet(rng, split, lexicon(split).cast(rng, 2))


def _scene(teller: Teller) -> None:
    words = teller.words
    teller.tell("scene", w=teller.rng.choice(words.skies), part=teller.rng.choice(words.parts))


def _job(teller: Teller, a: Person, chance: float = 0.35) -> None:
    if teller.rng.random() < chance:
        teller.tell("job", a, w=teller.rng.choice(teller.words.jobs))


def _aside(teller: Teller, a: Person, chance: float = 0.3) -> None:
    """Something that changes nothing."""
    if teller.rng.random() >= chance:
        return
    kind = teller.rng.choice(("rest", "saw", "wait", "feel"))
    words = {"saw": teller.words.animals, "feel": teller.words.feelings}.get(kind)
    teller.tell(kind, a, w=teller.rng.choice(words) if words else "")


def _thing(teller: Teller) -> tuple[str, str]:
    return teller.rng.choice(teller.words.things), teller.rng.choice(teller.words.colours)


def _places(teller: Teller, count: int) -> list[str]:
    return teller.rng.sample(teller.words.places, count)


def _amounts(teller: Teller) -> tuple[int, int]:
    """A number, and a smaller one of one digit."""
    n = teller.rng.choice(teller.words.numbers)
    if teller.split == "train" and teller.rng.random() < 0.4:
        n = teller.rng.randint(2, 9)
    return n, teller.rng.randint(1, min(9, n - 1))


def _lost(teller: Teller) -> None:
    """Someone loses a thing, searches in vain, is told where it is, finds it."""
    a, b = teller.words.cast(teller.rng, 2)
    (thing, colour), (start, *wrong, right) = _thing(teller), _places(teller, 4)
    _job(teller, a)
    teller.tell("at", a, l=start)
    teller.tell("own", a, t=thing, c=colour)
    teller.tell("missing", a, t=thing)
    for place in wrong[: teller.rng.randint(1, 2)]:
        teller.tell("go", a, l=place)
        teller.tell("search", a)
    if teller.rng.random() < 0.7:
        teller.tell("meet", a, b)
        teller.tell("ask", a, b, t=thing)
        teller.tell("told", b, l=right)
    teller.tell("go", a, l=right)
    teller.tell("find", a, t=thing)
    teller.tell("feel", a, w=teller.rng.choice(("happy", "proud")))


def _market(teller: Teller) -> None:
    """Someone gets goods, gives some away, loses some."""
    a, b = teller.words.cast(teller.rng, 2)
    first, second, third = _places(teller, 3)
    goods, (n, less) = teller.rng.choice(teller.words.goods), _amounts(teller)
    _job(teller, a)
    teller.tell("at", a, l=first)
    teller.tell("go", a, l=second)
    teller.tell(teller.rng.choice(("buy", "collect")), a, n=n, g=goods)
    _aside(teller, a)
    teller.tell("go", a, l=third)
    if teller.rng.random() < 0.65:
        teller.tell("meet", a, b)
        if teller.rng.random() < 0.5:
            teller.tell("feel", b, w=teller.rng.choice(("hungry", "sad", "tired")))
        teller.tell("share", a, b, n=less, g=goods)
        if teller.rng.random() < 0.5:
            teller.tell("thank", b, a)
    else:
        teller.tell("use", a, n=less, g=goods)
        teller.tell("feel", a, w=teller.rng.choice(("sad", "angry")))


def _gift(teller: Teller) -> None:
    """Someone makes a present and brings it."""
    a, b = teller.words.cast(teller.rng, 2)
    (thing, colour), (first, second, third) = _thing(teller), _places(teller, 3)
    teller.tell("birthday", b)
    teller.tell("at", b, l=third)
    teller.tell("wish", a, b)
    teller.tell("at", a, l=first)
    teller.tell("go", a, l=second)
    teller.tell("make", a, t=thing, c=colour)
    _aside(teller, a)
    teller.tell("go", a, l=third)
    if teller.rng.random() < 0.5:
        teller.tell("meet", a, b)
    teller.tell("give", a, b, t=thing)
    teller.tell("thank", b, a)
    _aside(teller, b)


def _errand(teller: Teller) -> None:
    """Someone is sent with a thing to another place."""
    a, b = teller.words.cast(teller.rng, 2)
    (thing, colour), (first, second) = _thing(teller), _places(teller, 2)
    _job(teller, a)
    teller.tell("together", a, b, l=first)
    teller.tell("own", a, t=thing, c=colour)
    teller.tell("send", a, b, t=thing, l=second)
    teller.tell("give", a, b, t=thing)
    teller.tell("go", b, l=second)
    _aside(teller, b)
    teller.tell("drop", b, t=thing)
    if teller.rng.random() < 0.5:
        teller.tell("go", b, l=first)


def _rain(teller: Teller) -> None:
    """People go out, flee from the rain, come back."""
    a, b = teller.words.cast(teller.rng, 2)
    first, second, third = _places(teller, 3)
    teller.tell("together", a, b, l=first)
    teller.tell("both_go", a, b, l=second)
    teller.tell("rain")
    if teller.rng.random() < 0.5:
        teller.tell("both_go", a, b, l=third)
    else:
        teller.tell("go", a, l=third)
        teller.tell("go", b, l=first)
    teller.tell("wait", a)
    teller.tell("dry")
    teller.tell("go", b, l=second)
    if teller.rng.random() < 0.5:
        teller.tell("feel", b, w=teller.rng.choice(teller.words.feelings))


def _race(teller: Teller) -> None:
    """Three people run; each comes in at a place of their own."""
    a, b, d = teller.words.cast(teller.rng, 3)
    (thing, colour), (start, goal) = _thing(teller), _places(teller, 2)
    teller.tell("at", a, l=start)
    if teller.rng.random() < 0.4:
        _aside(teller, a, 1.0)
    teller.tell("race", a, b, d, l=goal)
    order = teller.rng.sample([a, b, d], 3)
    for kind, runner in zip(("first", "second", "last"), order, strict=True):
        teller.tell(kind, runner)
    teller.tell("prize", order[0], t=thing, c=colour)
    teller.tell("feel", order[0], w=teller.rng.choice(("happy", "proud")))
    teller.tell("feel", order[2], w=teller.rng.choice(("sad", "tired", "angry")))


def _hiding(teller: Teller) -> None:
    """Two hide, one seeks."""
    a, b, d = teller.words.cast(teller.rng, 3)
    first, second, third = _places(teller, 3)
    teller.tell("at", a, l=third)
    teller.tell("game", a, b, d)
    hidden = [(b, first), (d, second)]
    for person, place in hidden:
        teller.tell("hide", person, l=place)
    teller.tell("wait", a)
    for person, place in teller.rng.sample(hidden, 2):
        teller.tell("caught", a, person, l=place)
        if teller.rng.random() < 0.3:
            teller.tell("feel", person, w=teller.rng.choice(("sad", "angry", "happy")))


def _repair(teller: Teller) -> None:
    """A thing breaks, someone mends it for coins."""
    a, b = teller.words.cast(teller.rng, 2)
    (thing, colour), (first, second) = _thing(teller), _places(teller, 2)
    n = teller.rng.choice(teller.words.numbers)
    _job(teller, b, 0.7)
    teller.tell("at", b, l=second)
    teller.tell("own", a, t=thing, c=colour)
    teller.tell("at", a, l=first)
    teller.tell("break", a, t=thing)
    teller.tell("go", a, l=second)
    teller.tell("give", a, b, t=thing)
    teller.tell("mend", b, t=thing)
    teller.tell("pay", a, b, n=n)
    teller.tell("give", b, a, t=thing)
    if teller.rng.random() < 0.5:
        teller.tell("feel", a, w="happy")


def _swap(teller: Teller) -> None:
    """Two people exchange their things."""
    a, b = teller.words.cast(teller.rng, 2)
    [place] = _places(teller, 1)
    mine, theirs = teller.rng.sample(teller.words.things, 2)
    colours = teller.rng.sample(teller.words.colours, 2)
    teller.tell("together", a, b, l=place)
    teller.tell("own", a, t=mine, c=colours[0])
    teller.tell("own", b, t=theirs, c=colours[1])
    teller.tell("want", a, t=theirs)
    teller.tell("want", b, t=mine)
    teller.tell("give", a, b, t=mine)
    teller.tell("give", b, a, t=theirs)
    _aside(teller, b)


def _day(teller: Teller) -> None:
    """One or two people spend a day in several places."""
    people = teller.words.cast(teller.rng, teller.rng.randint(1, 2))
    _job(teller, people[0], 0.8)
    places = _places(teller, 3 * len(people))
    for number, kind in enumerate(("morning", "noon", "evening")):
        for index, person in enumerate(people):
            teller.tell(kind, person, l=places[number * len(people) + index])
            _aside(teller, person, 0.25)


def _walk(teller: Teller) -> None:
    """People move about, take things and leave them."""
    people = teller.words.cast(teller.rng, teller.rng.randint(2, 3))
    places = _places(teller, 4)
    things = teller.rng.sample(teller.words.things, 2)
    colours = dict(zip(things, teller.rng.sample(teller.words.colours, 2), strict=True))
    for person in people:
        teller.tell("at", person, l=teller.rng.choice(places))
    for thing in things:
        teller.tell("lies", l=teller.rng.choice(places), t=thing, c=colours[thing])
    for _ in range(teller.rng.randint(4, 8)):
        _move(teller, teller.rng.choice(people), people, places)


def _move(teller: Teller, a: Person, people: list[Person], places: list[str]) -> None:
    """One thing that a person can do where things stand."""
    state, rng = teller.state, teller.rng
    here = state.place[a.name]
    held = [t for t, who in state.holder.items() if who == a.name]
    lying = [t for t, place in state.lies.items() if place == here]
    others = [b for b in people if b is not a and state.place.get(b.name) == here]
    if held and others and rng.random() < 0.6:
        teller.tell("give", a, rng.choice(others), t=rng.choice(held))
    elif lying and rng.random() < 0.7:
        teller.tell("take", a, t=rng.choice(lying))
    elif held and rng.random() < 0.35:
        teller.tell("drop", a, t=rng.choice(held))
    else:
        wanted = [p for p in state.lies.values() if p != here] if rng.random() < 0.5 else []
        teller.tell("go", a, l=rng.choice(wanted or [p for p in places if p != here]))


def _tell_job(teller: Teller, a: Person, b: Person) -> None:
    _job(teller, a, 1.0)
    teller.tell("at", a, l=_places(teller, 1)[0])


def _tell_thing(teller: Teller, a: Person, b: Person) -> None:
    thing, colour = _thing(teller)
    teller.tell("own", a, t=thing, c=colour)
    teller.tell("together", a, b, l=_places(teller, 1)[0])
    if teller.rng.random() < 0.5:
        teller.tell("give", a, b, t=thing)


def _tell_goods(teller: Teller, a: Person, b: Person) -> None:
    teller.tell("go", a, l=_places(teller, 1)[0])
    n, less = _amounts(teller)
    goods = teller.rng.choice(teller.words.goods)
    teller.tell("buy", a, n=n, g=goods)
    if teller.rng.random() < 0.5:
        teller.tell("share", a, b, n=less, g=goods)


def _tell_day(teller: Teller, a: Person, b: Person) -> None:
    for kind, place in zip(("morning", "evening"), _places(teller, 2), strict=True):
        teller.tell(kind, a, l=place)


def _tell_birthday(teller: Teller, a: Person, b: Person) -> None:
    thing, colour = _thing(teller)
    teller.tell("birthday", a)
    teller.tell("wish", b, a)
    teller.tell("make", b, t=thing, c=colour)


PLOTS: tuple[Callable[[Teller], None], ...] = (
    _lost, _market, _market, _gift, _errand, _rain, _race, _hiding, _repair, _swap, _day, _walk, _walk,
)  # fmt: skip
SNIPPETS: tuple[Callable[[Teller, Person, Person], None], ...] = (
    _tell_job, _tell_thing, _tell_goods, _tell_day, _tell_birthday,
)  # fmt: skip
